"""Evaluation beside training: over real worker processes, a real HTTP server and a trainer that publishes numbers."""

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import train

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.environments.pool import PoolLimits, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec, WorkerReady
from prime_rl.errors import ArtifactError, DeadlineExceeded, EnvironmentSetupError
from prime_rl.evals.results import Results
from prime_rl.journal import Journal, read_journal
from prime_rl.monitors.base import FakeMonitor
from prime_rl.monitors.events import EventLog
from prime_rl.orchestrator import evaluation as evaluations
from prime_rl.orchestrator.ckpt import prepare_start
from prime_rl.orchestrator.evaluated import PROCESS
from prime_rl.orchestrator.evaluation import OnlineEvaluation, eval_suite, num_trained, open_evaluation, val_suite
from prime_rl.orchestrator.orchestrator import Extensions, Orchestrator, build_policy
from prime_rl.orchestrator.scoring import build_scorer
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchReader, BatchWriter
from prime_rl.transport.manifest import publish_dir

pytestmark = pytest.mark.usefixtures("workers_import_the_doubles")


@pytest.fixture
def config_of(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (inference, _):

        def build(**fields):
            fields = {"batch_size": 4, "rollouts_per_example": 2, "max_steps": 5, "max_concurrent": 8} | fields
            return OrchestratorConfig.model_validate(
                {
                    "client": {"base_url": inference.base_url},
                    "model": {"name": str(inference.model)},
                    "output_dir": tmp_path / "run",
                    "seq_len": 64,
                    "rollout_timeout": 10.0,
                    "env": [{"id": "train"}],
                    **fields,
                }
            )

        yield build


def scripted(label, script, **args):
    args = {"script": script, **args}
    return EnvironmentSpec(id="", label=label, args=args, base_urls=("",), model="", door="tests.doubles.door")


class Seen:
    """What a run left: its rows, those of its evaluations, and how each rollout of training ended."""

    def __init__(self):
        self.monitor, self.evals = FakeMonitor(), FakeMonitor()
        self.evaluated = asyncio.Event()
        self.ended = []
        self.ended_before = []
        """For each evaluation: how many rollouts of training had ended when it was told."""

    def log(self, metrics, *, step):
        self.ended_before.append(len(self.ended))
        self.evals.log(metrics, step=step)
        self.evaluated.set()

    def rows(self, kind):
        return {step: row for step, row in self.evals.rows if any(name.startswith(f"{kind}/") for name in row)}


async def produce(
    config, script, evaluated=(), *, before_publishing=lambda step, seen: asyncio.sleep(0), start=None, served=0
):
    """Train on one environment and evaluate on others, each a label and its script; from `start` on, with weights
    `served`."""
    paths, seen = RunPaths(config.output_dir), Seen()
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(open_clients(config.client))
        policy = build_policy(config, clients, paths, stack.enter_context(EventLog.opened(paths.events)))
        specs = [scripted("train", script)]
        own = [scripted(label, words, num_eval=len(words)) for label, words in evaluated]
        limits = PoolLimits(grace_s=0.5)
        pools = await stack.enter_async_context(open_pools(specs, num_workers=1, log_dir=None, limits=limits))
        eval_pools = await stack.enter_async_context(open_pools(own, num_workers=1, log_dir=None, limits=limits))
        await policy.start(30.0, version=served)
        suites = [eval_suite(config, eval_pools)] if config.eval else []
        suites += [val_suite(config, config.val, pools)] if config.val else []
        evaluation = OnlineEvaluation(
            config, suites, fleet=policy.fleet, monitor=seen, evals=paths.evals, journal=Journal(paths.journal, PROCESS)
        )
        stack.push_async_callback(evaluation.close)
        orchestrator = Orchestrator(
            config=config,
            pools=pools,
            policy=policy,
            writer=BatchWriter(paths.rollouts),
            monitor=seen.monitor,
            scorer=build_scorer(config),
            extensions=Extensions(evaluation=evaluation, on_end=seen.ended.append),
        )
        first = 0
        if start is not None:
            orchestrator.go_on(start)
            first = start.next_batch
        before = partial(before_publishing, seen=seen)
        training = asyncio.create_task(
            train(paths.output_dir, max_steps=config.max_steps, first=first, before_publishing=before)
        )
        try:
            await orchestrator.run()
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        seen.metrics = evaluation.metrics()
    return seen


async def test_the_base_comes_first_then_every_interval_then_the_last_weights_and_training_goes_on(config_of, caplog):
    own = {"interval": 2, "rollouts_per_example": 4, "env": [{"id": "a"}, {"id": "b"}]}
    config = config_of(eval=own, max_steps=5)
    scripts = ("a", ["right", 0.05, "wrong"]), ("b", ["right", "talk"])

    async def until_evaluated(step, seen):
        """The trainer is slower than the evaluations, so that none is passed by."""
        while len(seen.evals.rows) < (step + 1) // 2:
            seen.evaluated.clear()
            await seen.evaluated.wait()

    with caplog.at_level("INFO", logger="prime_rl"):
        seen = await produce(config, [0.02, 0.02], scripts, before_publishing=until_evaluated)
    rows = seen.rows("eval")
    assert list(rows) == [0, 2, 4, 5]
    assert len(seen.monitor.rows) == 5
    for step, row in rows.items():
        assert row["eval/a/avg@4"] == 0.5
        assert row["eval/a/pass@1"] == 0.5
        assert row["eval/a/pass@4"] == pytest.approx(2 / 3)
        assert row["eval/b/pass@2"] == pytest.approx((1 + 5 / 6) / 2)
        assert row["eval/b/completion_len/mean"] == 4.5
        assert row["eval/a/is_truncated/mean"] == row["eval/a/errors"] == 0
        assert step <= row["eval/a/version/min"] <= row["eval/a/version/max"] <= 5
        folder = config.output_dir / f"evals/step_{step}/a"
        assert json.loads((folder / "report.json").read_text())["pass_at"]["4"] == row["eval/a/pass@4"]
        assert len((folder / "results.jsonl").read_text().splitlines()) == 12
    assert seen.ended_before[0] < seen.ended_before[1] < seen.ended_before[2] <= len(seen.ended)
    (table, *_) = [line for line in caplog.messages if line.startswith("eval of weights 0:")]
    assert "base" in table
    assert "3 x 4" in table


async def test_training_does_not_wait_for_an_evaluation_nor_it_for_training(config_of):
    config = config_of(eval={"env": [{"id": "slow"}], "rollouts_per_example": 8, "share": 0.5}, max_steps=4)
    seen = await produce(config, [0.02, 0.02], [("slow", [0.3] * 5)])
    base, last = seen.rows("eval")[0], seen.rows("eval")[4]
    assert seen.ended_before[0] >= 8, "training went on while the base was evaluated"
    assert base["eval/slow/version/min"] == 0
    assert base["eval/slow/version/max"] >= 1, "and so new weights came, which it tells"
    assert last["eval/slow/version/min"] == last["eval/slow/version/max"] == 4


async def test_an_evaluation_may_run_alone_and_then_on_one_version_of_the_weights(config_of):
    own = {"env": [{"id": "slow"}], "interval": 1, "cancel_inflight_rollouts_on_eval": True}
    config = config_of(eval=own | {"rollouts_per_example": 4}, max_steps=3)
    seen = await produce(config, [0.02, 0.8], [("slow", [0.1] * 3)])
    rows = seen.rows("eval")
    assert {0, 3} <= set(rows)
    for step, row in rows.items():
        assert row["eval/slow/version/min"] == row["eval/slow/version/max"] == step
    assert seen.ended_before[0] == 0, "nothing of training ended while the base was evaluated"
    why = Counter(one.end.why for one in seen.ended if one.end.kind == "cancelled")
    assert why["evaluation"] >= 1
    assert len(seen.monitor.rows) == 3


async def test_while_training_waits_for_an_evaluation_each_of_its_rollouts_gives_the_servers_more_time(
    config_of, monkeypatch
):
    waited, renew = [], Orchestrator._renew_waiting

    def noting(self):
        before = self._waiting.seconds if self._is_evaluated_alone and self._waiting is not None else None
        renew(self)
        if before is not None:
            waited.append((before, self._waiting.seconds))

    monkeypatch.setattr(Orchestrator, "_renew_waiting", noting)
    own = {"env": [{"id": "slow"}], "interval": 1, "cancel_inflight_rollouts_on_eval": True}
    config = config_of(eval=own | {"rollouts_per_example": 4}, max_steps=1)
    await produce(config, [0.02, 0.02], [("slow", [0.1] * 3)])
    assert len(waited) >= 11, "the base was evaluated with 12 rollouts"
    assert all(after < before for before, after in waited)


async def test_failed_rollouts_are_counted_and_are_no_scores(config_of, caplog):
    config = config_of(eval={"env": [{"id": "e"}], "rollouts_per_example": 2}, max_steps=1, max_attempts=2)
    seen = await produce(config, [0.02, 0.02], [("e", ["right", "fail", "raise"])])
    for row in seen.rows("eval").values():
        assert row["eval/e/avg@2"] == row["eval/e/pass@2"] == 1.0
        assert row["eval/e/errors"] == 4
    report = json.loads((config.output_dir / "evals/step_0/e/report.json").read_text())
    assert report["errors"] == {"environment": 2, "scorer": 2}
    assert report["num_examples"] == 3
    assert seen.metrics == {
        "evaluation/dispatched": 12, "evaluation/in_flight": 0, "evaluation/used": 4, "evaluation/cancelled": 0,
        "evaluation/failed": 8, "evaluation/failed/environment": 4, "evaluation/failed/scorer": 4,
    }  # fmt: skip
    (warning, _) = [line for line in caplog.messages if "failed:" in line]
    assert warning.startswith("4 of 6 rollouts of e failed: 2 scorer (scorer: scorer broke), 2 environment (")


async def test_rollouts_that_are_run_again_are_counted(config_of):
    """The last of them: what its worker died of is its own, after which nothing else is left to run."""
    config = config_of(eval={"env": [{"id": "e"}], "eval_base_model": False}, max_steps=1, max_attempts=3)
    seen = await produce(config, [0.02, 0.02], [("e", ["right", "exit"])])
    (row,) = seen.rows("eval").values()
    assert row["eval/e/errors/worker_died"] == 1
    assert row["eval/e/retries"] >= 2
    metrics = seen.metrics
    assert metrics["evaluation/dispatched"] == 2 + row["eval/e/retries"] == 1 + metrics["evaluation/failed/worker_died"]
    assert (metrics["evaluation/in_flight"], metrics["evaluation/used"]) == (0, 1)


async def test_what_is_in_flight_at_the_end_of_the_run_is_cancelled_and_nothing_is_kept_of_it(config_of):
    config = config_of(eval={"env": [{"id": "e"}]}, max_steps=1, weights_timeout=0.5)
    with pytest.raises(DeadlineExceeded):
        await produce(
            config, [0.02, 0.02], [("e", [0.01, 30.0])],
            before_publishing=lambda step, seen: asyncio.Event().wait(),
        )  # fmt: skip
    assert list((config.output_dir / "evals").iterdir()) == []


async def test_an_evaluation_that_cannot_be_saved_is_told_of_and_training_goes_on(config_of, caplog):
    config = config_of(eval={"env": [{"id": "e"}], "interval": 1}, max_steps=2)
    (config.output_dir / "evals").mkdir(parents=True)
    (config.output_dir / "evals" / "step_0").write_text("in the way")
    seen = await produce(config, [0.02, 0.02], [("e", ["right"] * 3)])
    assert len(seen.monitor.rows) == 2
    assert seen.rows("eval")[0]["eval/e/avg@1"] == 1.0
    told = [line for line in caplog.messages if "are not saved" in line]
    assert len(told) == 1
    assert "evals/step_0: Not a directory" in told[0]
    assert (config.output_dir / "evals/step_2/e/report.json").exists()


async def test_a_disk_that_takes_nothing_ends_the_saving_and_holds_up_no_thread_that_training_needs(
    config_of, caplog, monkeypatch
):
    """The executor has three, of which the trainer waits in one; writes that had the others would keep batches from
    being written."""
    hung, calls = threading.Event(), []
    monkeypatch.setattr(Results, "add", lambda *args: (calls.append(args), hung.wait()))
    monkeypatch.setattr(evaluations, "SAVE_TIMEOUT_S", 0.3)
    executor = ThreadPoolExecutor(3)
    asyncio.get_running_loop().set_default_executor(executor)
    config = config_of(eval={"env": [{"id": "e"}], "interval": 2}, max_steps=2)
    try:
        async with asyncio.timeout(60):
            seen = await produce(config, [0.02, 0.02], [("e", ["right"] * 3)])
        assert executor.submit(int).result(5) == 0
    finally:
        hung.set()
    assert len(seen.monitor.rows) == 2
    assert seen.rows("eval").keys() == {0, 2}
    told = [line for line in caplog.messages if "are not saved: the disk did not take it within 0.3 s" in line]
    assert len(told) == len(calls) == 2, "each evaluation tries once"


async def test_results_of_an_earlier_run_are_found_before_anything_is_evaluated(config_of):
    config = config_of(eval={"env": [{"id": "not-there"}]})
    paths = RunPaths(config.output_dir)
    with publish_dir(paths.evals / "step_0"):
        pass
    with pytest.raises(ArtifactError, match="step_0 holds an evaluation of an earlier run; choose another output_dir"):
        async with open_evaluation(config, {}, None, paths):
            pass


async def test_held_out_examples_give_validation_rewards_and_never_train(config_of):
    val = {"num_examples": 2, "rollouts_per_example": 2, "interval": 2}
    config = config_of(val=val, max_steps=4)
    seen = await produce(config, ["ok"] * 3 + ["right", "wrong"])
    rows = seen.rows("val")
    assert {0, 4} <= set(rows)
    assert all(row["val/train/avg@2"] == 0.5 and row["val/train/pass@2"] == 0.5 for row in rows.values())
    assert {one.dispatch.example.index for one in seen.ended} == {0, 1, 2}
    assert not (config.output_dir / "evals").exists()


async def test_last_weights_that_do_not_come_end_the_run_in_words(config_of):
    config = config_of(eval={"env": [{"id": "e"}]}, max_steps=1, weights_timeout=0.5)
    with pytest.raises(DeadlineExceeded, match=r"waited 0.5 s for weights 1 \(serving 0\) to evaluate"):
        await produce(
            config, [0.02, 0.02], [("e", ["right"])], before_publishing=lambda step, seen: asyncio.Event().wait()
        )


def test_an_environment_keeps_examples_to_train_on(config_of):
    pool = SimpleNamespace(label="t", size=WorkerReady(num_train=8, num_eval=0, has_eval_split=False))
    assert num_trained(config_of(), pool) == 8
    assert num_trained(config_of(val={"num_examples": 7}), pool) == 1
    with pytest.raises(EnvironmentSetupError, match=r"'t' has 8 training examples, and val\.num_examples = 8 would"):
        num_trained(config_of(val={"num_examples": 8}), pool)


async def test_a_benchmark_of_generation_evaluates_nothing(config_of, tmp_path):
    config = config_of(eval={"env": [{"id": "not-there"}]}, val={}, bench=True)
    async with open_evaluation(config, {}, None, RunPaths(tmp_path)) as evaluation:
        assert evaluation is None


async def test_an_evaluation_that_was_cut_off_is_run_again_on_its_weights_before_training_goes_on(config_of):
    own = {"interval": 1, "rollouts_per_example": 4, "env": [{"id": "a"}]}
    scripts = [("a", ["right", 0.05, "wrong"])]
    await produce(config_of(eval=own, max_steps=3, max_async_level=0), [0.02, 0.02], scripts)
    config = config_of(eval=own, max_steps=5, max_async_level=0, recover=True)
    paths = RunPaths(config.output_dir)
    start = replace(prepare_start(config, paths), evaluated={"eval": 0}, cut_off=1)
    assert (start.next_batch, start.state.scheduler.version) == (3, 2)
    seen = await produce(config, [0.02, 0.02], scripts, start=start, served=1)
    rows = seen.rows("eval")
    assert next(iter(rows)) == 1
    assert rows[1]["eval/a/version/min"] == rows[1]["eval/a/version/max"] == 1
    assert seen.ended_before[0] == 0, "training waited"
    assert list(rows)[-1] == 5
    steps = [step for step, _ in seen.monitor.rows]
    assert steps == [3, 4]
    assert seen.monitor.rows[-1][1]["progress/total_samples"] == 5 * 4
    assert seen.metrics["evaluation/dispatched"] == 12 * len(rows) + start.state.evaluation.dispatched
    for step in (3, 4):
        batch = BatchReader(paths.rollouts).read(step, 1)
        assert (batch.min_version, batch.max_version) == (step, step)
    events = [(one.event, one.step) for one in read_journal(paths.journal) if one.facts.get("kind") == "eval"]
    assert [one for one in events if one[1] == 1][-2:] == [("evaluation_begun", 1), ("evaluation_complete", 1)]
