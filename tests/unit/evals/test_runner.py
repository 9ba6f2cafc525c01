"""Evaluation over real worker processes and a real HTTP server."""

import json
from pathlib import Path

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import publish_number

from prime_rl.config.evals import EvalConfig
from prime_rl.environments.rollouts import EnvironmentSpec, WorkerReady
from prime_rl.errors import ArtifactError, ConfigError, PrimeRLError
from prime_rl.evals import runner
from prime_rl.evals.runner import Evaluation, evaluate, run
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, server):
        double.server = server
        yield double


@pytest.fixture
def config_of(inference, tmp_path):
    def build(**fields):
        return EvalConfig.model_validate(
            {
                "client": {"base_url": inference.base_url},
                "model": {"name": str(inference.model)},
                "env": [{"id": "reverse-text", "args": {"num_eval_examples": 4, "max_words": 3}}],
                "output_dir": tmp_path / "run",
                "rollouts_per_example": 2,
                **fields,
            }
        )

    return build


def test_the_model_and_each_step_are_evaluated_on_held_out_texts_and_shown(config_of, inference, tmp_path, capsys):
    weights = tmp_path / "weights"
    for step in (1, 2):
        publish_number(weights, step)

    def reply(text):
        return {0: "", 1: text, 2: text[::-1]}[inference.version] or "?"

    inference.reply = reply
    config = config_of(weights_dir=weights)
    run(config)
    paths = RunPaths(config.output_dir)
    averages = {}
    for step in (0, 1, 2):
        folder = paths.evals / f"step_{step}" / "reverse-text"
        averages[step] = json.loads((folder / "report.json").read_text())["avg"]
        assert len((folder / "results.jsonl").read_text().splitlines()) == 8
    assert averages[0] < 0.2 < averages[1] < averages[2] == 1.0
    assert [row["step"] for row in read_metrics(paths.metrics("eval"))] == [0, 1, 2]
    assert read_metrics(paths.metrics("eval"))[2]["eval/reverse-text/avg@2"] == 1.0
    assert (paths.logs / "envs" / "reverse-text-0.log").exists()
    shown = capsys.readouterr().out
    assert "base" in shown
    assert "step_2" in shown

    with pytest.raises(ArtifactError, match="step_0 exists already"):
        run(config)


async def test_a_server_that_another_run_left_its_weights_in_is_measured_with_its_own_model(config_of, inference):
    inference.version, inference.digest = 7, "ab"
    inference.reply = lambda text: text[::-1] if inference.version == 0 else "?"
    (report,) = await evaluate(config_of())
    assert (report.step, report.avg, inference.num_reloads) == (0, 1.0, 1)


@pytest.fixture
def play(monkeypatch):
    """Has rollouts do what a script says, a word an example, in workers that load at once."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def scripted(*words):
        def spec_of(env, **fields):
            return EnvironmentSpec(
                id=env.id, label=env.label, args={"script": list(words), "num_eval": len(words)}, base_urls=("",),
                model="", door="tests.doubles.door",
            )  # fmt: skip

        monkeypatch.setattr(runner, "environment_spec", spec_of)

    return scripted


async def test_several_servers_are_all_given_the_weights(config_of, inference, play, tmp_path, unused_tcp_port):
    play("right")
    publish_number(tmp_path / "weights", 3)
    with running_inference(tmp_path / "model", unused_tcp_port) as (other, _):
        client = {"base_url": [inference.base_url, other.base_url]}
        await evaluate(config_of(client=client, weights_dir=tmp_path / "weights"))
        assert [inference.updates, other.updates] == [[(str(tmp_path / "weights" / "step_3"), 3)]] * 2


async def test_errors_are_counted_and_when_nothing_works_there_is_no_result(config_of, play):
    play("right", "fail", "raise")
    (report,) = await evaluate(config_of())
    assert report.errors == {"scorer": 2, "environment": 2}
    assert report.avg == 1.0
    play("fail", "fail")
    config = config_of(output_dir=RunPaths(config_of().output_dir).output_dir / "second")
    with pytest.raises(PrimeRLError, match=r"4 of 4 rollouts of reverse-text failed: 4 scorer \(scorer: scorer broke"):
        await evaluate(config)
    assert not list((config.output_dir / "evals").iterdir())


async def test_rollouts_whose_worker_another_ended_are_run_again(config_of, play):
    play("exit", "right", "right")
    (report,) = await evaluate(config_of())
    assert report.errors == {"worker_died": 2}
    assert report.avg == 1.0
    assert report.retries > 0


async def test_examples_sampling_logs_and_checks_are_as_configured(config_of, inference, caplog):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "seed": 7}
    env = {"id": "reverse-text", "args": {"num_eval_examples": 6}, "skip_first": 2, "num_examples": 3}
    config = config_of(
        env=[env],
        sampling=sampling,
        log={"log_data": True, "env_worker_logs": False},
        client={"base_url": inference.base_url, "skip_model_check": True},
        model={"name": f"{inference.model}/../model"},
    )
    with caplog.at_level("INFO", logger="prime_rl"):
        await evaluate(config)
    results = RunPaths(config.output_dir).evals / "step_0" / "reverse-text" / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted((row["example"], row["rollout"]) for row in rows) == [
        (2, 4), (2, 5), (3, 6), (3, 7), (4, 8), (4, 9),
    ]  # fmt: skip
    assert sorted(sent["seed"] for sent in inference.sampling) == [7 + number for number in range(4, 10)]
    assert all(sent | {"seed": 7} == sent | sampling for sent in inference.sampling)
    (line,) = [line for line in caplog.messages if line.startswith("The first rollout of reverse-text is ")]
    assert json.loads(line.partition(" is ")[2])[-1]["role"] == "assistant"
    assert not (RunPaths(config.output_dir).logs / "envs").exists()


@pytest.mark.parametrize(("max_concurrent", "most_running"), [(2, 2), (None, 8)])
async def test_as_many_rollouts_run_at_once_as_are_allowed_and_none_is_no_limit(
    max_concurrent, most_running, config_of, inference
):
    inference.latency_s = 1.0 if max_concurrent is None else 0.05
    await evaluate(config_of(max_concurrent=max_concurrent))
    assert inference.most_running == most_running


async def test_sampling_that_is_not_set_is_the_servers(config_of, inference):
    await evaluate(config_of(rollouts_per_example=1))
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "seed")
    assert len(inference.sampling) == 4
    assert not any(sent.get(name) for sent in inference.sampling for name in names)


class Pool:
    """What an evaluation asks of a pool before it runs."""

    def __init__(self, *, has_eval_split):
        self.label = "sums"
        self.size = WorkerReady(num_train=3, num_eval=3, has_eval_split=has_eval_split)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, [0, 1, 2]), ({"skip_first": 1}, [1, 2]), ({"num_examples": 2}, [0, 1]), ({"num_examples": 9}, [0, 1, 2])],
)
def test_examples_are_those_from_the_first_wanted_one_on(config_of, fields, expected):
    config = config_of(env=[{"id": "sums", **fields}])
    evaluation = Evaluation(config=config, clients=(), pools={"sums": Pool(has_eval_split=True)})
    assert list(evaluation._parts[0].examples) == expected


def test_an_evaluation_on_training_data_is_warned_of(config_of, caplog):
    for has_eval_split in (True, False):
        pools = {"sums": Pool(has_eval_split=has_eval_split)}
        Evaluation(config=config_of(env=[{"id": "sums"}]), clients=(), pools=pools)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "Environment sums has no evaluation split: what is reported is on the examples that it trains on"
    )


def test_leaving_out_all_examples_is_refused_before_anything_is_evaluated(config_of):
    config = config_of(env=[{"id": "sums", "skip_first": 3}])
    with pytest.raises(
        ConfigError, match="skip_first = 3 leaves none of the 3 evaluation examples of environment 'sums'"
    ):
        Evaluation(config=config, clients=(), pools={"sums": Pool(has_eval_split=True)})


async def test_what_cannot_be_evaluated_is_refused_before_anything_starts(config_of, inference, tmp_path):
    with pytest.raises(ConfigError, match=r"client\.base_url"):
        await evaluate(config_of(client=None))
    publish_number(tmp_path / "weights", 2)
    with pytest.raises(ArtifactError, match=r"no complete step 5, only \[2\]"):
        await evaluate(config_of(weights_dir=tmp_path / "weights", steps=[5]))
    with pytest.raises(ArtifactError, match="holds no complete weights"):
        await evaluate(config_of(weights_dir=tmp_path / "nothing"))
