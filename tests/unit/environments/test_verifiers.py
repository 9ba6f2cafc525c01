"""The verifiers door, in process, over a real HTTP server. Both APIs of verifiers."""

import asyncio
import logging
import sys
import textwrap

import msgspec
import pytest
import pytest_asyncio
from starlette.responses import JSONResponse
from tests.doubles.inference import running_inference

from prime_rl.environments import verifiers
from prime_rl.environments.rollouts import EnvironmentSpec, FailureKind, RolloutRequest
from prime_rl.errors import EnvironmentSetupError

FAULTY_CLASSIC = """
import math
import verifiers.legacy as vf
from datasets import Dataset

def correct(completion, answer):
    if answer == "scorer":
        raise ZeroDivisionError("scorer broke")
    return {"nan": math.nan}.get(answer, 1.0)

async def length(completion):
    return float(len(completion[-1].content))

class Faulty(vf.SingleTurnEnv):
    async def setup_state(self, state):
        if state["answer"] == "raise":
            raise KeyError("environment broke")
        return await super().setup_state(state)

def load_environment(answers):
    rows = [{"prompt": [{"role": "user", "content": f"say {a}"}], "answer": a} for a in answers]
    rubric = vf.Rubric(funcs=[correct, length], weights=[1.0, 0.0])
    return Faulty(dataset=Dataset.from_list(rows), rubric=rubric)
"""

FAULTY_V1 = """
import math
from typing import Any
import verifiers.v1 as vf

class FaultyConfig(vf.TasksetConfig):
    answers: list[str]

class FaultyData(vf.TaskData):
    answer: str

class FaultyTask(vf.Task[FaultyData]):
    async def setup(self, trace, runtime):
        if self.data.answer == "raise":
            raise KeyError("environment broke")

    @vf.reward
    async def correct(self, trace) -> float:
        if self.data.answer == "scorer":
            raise ZeroDivisionError("scorer broke")
        return {"nan": math.nan}.get(self.data.answer, 1.0)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    def load(self):
        for index, answer in enumerate(self.config.answers):
            yield FaultyTask(FaultyData(idx=index, prompt=f"say {answer}", answer=answer), self.config.task)

__all__ = ["FaultyTaskset"]
"""

# One event loop for all, here and in `verifiers/test_classic.py`: renderers keeps an asyncio lock in a module, as is
# right in a worker, which has one loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")

OTHERS = {
    "broken_env": "import no_such_dependency",
    "raising_env": "raise RuntimeError('bad luck')",
    "lazy_env": """
        import verifiers.legacy as vf
        def build():
            raise TypeError("rows of the wrong type")
        def load_environment():
            return vf.SingleTurnEnv(dataset=build, rubric=vf.Rubric())
    """,
    "talking_env": """
        import verifiers.legacy as vf
        from datasets import Dataset
        class Talking(vf.MultiTurnEnv):
            async def env_response(self, messages, state):
                if state["info"].get("breaks"):
                    raise KeyError("environment broke")
                return [{"role": "user", "content": "again"}]
        def load_environment(breaks=False):
            rows = [{"prompt": [{"role": "user", "content": "say"}], "answer": "", "info": {"breaks": breaks}}]
            return Talking(dataset=Dataset.from_list(rows), rubric=vf.Rubric(), max_turns=2)
    """,
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Environment modules that can be imported by their name."""
    directory = tmp_path_factory.mktemp("modules")
    (directory / "faulty_classic.py").write_text(FAULTY_CLASSIC)
    (directory / "faulty_v1.py").write_text(FAULTY_V1)
    for name, source in OTHERS.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(source))
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, _):
        yield double


@pytest_asyncio.fixture(params=["classic", "v1"], loop_scope="session")
async def run(request, modules, inference):
    """Runs one rollout per answer in an environment of either API."""
    environments = []

    async def runner(*answers, sampling=None, version=0):
        spec = spec_of(inference, f"faulty-{request.param}", answers=list(answers))
        spec = msgspec.structs.replace(spec, headers={"X-Team": "blue"})
        environment = await verifiers.load(spec)
        environments.append(environment)
        requests = [
            RolloutRequest(id=i, example=i, sampling=sampling or {"temperature": 1.0}, version=version, timeout_s=30)
            for i in range(len(answers))
        ]
        return await asyncio.gather(*(environment.run(request) for request in requests))

    runner.api = request.param
    yield runner
    for environment in environments:
        await environment.close()


def spec_of(inference, env_id, api="auto", **args):
    return EnvironmentSpec(
        id=env_id, label="env", args=args, base_urls=(inference.base_url,), model=str(inference.model), api=api
    )


async def test_a_rollout_carries_exact_tokens_logprobs_reward_and_metrics(run, inference):
    inference.reply = lambda text: "abcd"
    (rollout,) = await run("ok")
    (turn,) = rollout.turns
    assert inference.tokenizer.decode(turn.prompt_ids) == (
        "<|im_start|>user\nsay ok<|im_end|>\n<|im_start|>assistant\n"
    )
    assert inference.tokenizer.decode(turn.completion_ids) == "abcd<|im_end|>"
    assert turn.logprobs == (-0.5,) * 5
    assert rollout.failure is None
    assert rollout.reward == 1.0
    assert rollout.metrics["length"] == 4.0
    assert rollout.metrics["correct"] == 1.0
    assert not rollout.truncated
    assert rollout.messages == [{"role": "user", "content": "say ok"}, {"role": "assistant", "content": "abcd"}]
    assert rollout.timings["total"] >= rollout.timings["generate"] > 0


async def test_each_token_knows_the_weights_that_sampled_it(run, inference):
    inference.version = 4
    inference.latency_s = 0.3
    inference.reply = lambda text: "abcd"
    running = asyncio.create_task(run("ok"))
    await asyncio.to_thread(inference.is_sampling.wait, 10)
    inference.version = 5
    (rollout,) = await running
    assert rollout.turns[0].versions == (4, 4, 5, 5, 5)


async def test_equal_turns_of_different_weights_keep_their_own_versions(modules, inference):
    def reply(text):
        inference.version = 4 if text == "say" else 5
        return "abc"

    inference.reply = reply
    inference.version = 4
    environment = await verifiers.load(spec_of(inference, "talking-env"))
    rollout = await environment.run(RolloutRequest(id=0, example=0, sampling={}, version=4, timeout_s=30))
    await environment.close()
    assert [turn.versions for turn in rollout.turns] == [(4,) * 4, (5,) * 4], rollout


async def test_nothing_is_kept_of_a_rollout_that_broke(modules, inference):
    inference.version = 4
    environment = await verifiers.load(spec_of(inference, "talking-env", breaks=True))
    rollout = await environment.run(RolloutRequest(id=0, example=0, sampling={}, version=4, timeout_s=30))
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.ENVIRONMENT
    assert environment._traffic._sampled == {}
    await environment.close()


@pytest.mark.parametrize("api", ["classic", "v1"])
async def test_a_rollout_goes_to_its_server_and_on_to_the_next_when_that_is_lost_or_too_old(
    modules, inference, tmp_path, unused_tcp_port, api
):
    with running_inference(tmp_path / "model", unused_tcp_port) as (other, server):
        spec = spec_of(inference, f"faulty-{api}", answers=["ok"])
        spec = msgspec.structs.replace(spec, base_urls=(inference.base_url, other.base_url))
        environment = await verifiers.load(spec)

        async def run(version):
            servers = (other.base_url, inference.base_url)
            request = RolloutRequest(id=0, example=0, sampling={}, version=version, timeout_s=30, servers=servers)
            rollout = await environment.run(request)
            assert rollout.failure is None
            return rollout.failovers, inference.num_requests, other.num_requests

        assert await run(0) == (0, 0, 1)
        inference.version = 3
        assert await run(3) == (1, 1, 2), "the other was started again and has its first weights"
        await asyncio.to_thread(server.stop)
        assert await run(3) == (1, 2, 2)
        environment.avoid(frozenset({other.base_url}))
        assert await run(3) == (0, 3, 2)
        await environment.close()
        server.start()


@pytest.mark.parametrize("api", ["classic", "v1"])
async def test_nothing_is_kept_of_a_rollout_that_was_cancelled(modules, inference, api):
    environment = await verifiers.load(spec_of(inference, f"faulty-{api}", answers=["ok"]))
    inference.latency_s = 0.3
    request = RolloutRequest(id=0, example=0, sampling={}, version=0, timeout_s=30)
    running = asyncio.create_task(environment.run(request))
    await asyncio.to_thread(inference.is_sampling.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while inference.num_running:  # noqa: ASYNC110 - it is another thread's doing
        await asyncio.sleep(0.01)
    await environment.run(request)
    assert environment._traffic._sampled == {}
    await environment.close()


async def test_without_versions_from_the_server_tokens_count_as_old_as_their_dispatch(run, inference):
    inference.sends_versions = False
    inference.version = 7
    (rollout,) = await run("ok", version=7)
    assert set(rollout.turns[0].versions) == {7}


async def test_rollouts_at_the_same_time_do_not_mix_their_tokens(run, inference):
    inference.reply = lambda text: text.removeprefix("say ") * 3
    rollouts = await run(*"abcdefgh")
    for letter, rollout in zip("abcdefgh", rollouts, strict=True):
        assert inference.tokenizer.decode(rollout.turns[0].completion_ids) == letter * 3 + "<|im_end|>"


async def test_sampling_arguments_reach_the_server(run, inference):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    sampling |= {"max_tokens": 30, "min_tokens": 1, "seed": 3}
    (rollout,) = await run("ok", sampling=sampling | {"extra_body": {"ignore_eos": True}})
    assert rollout.failure is None
    (sent,) = inference.sampling
    assert {name: sent[name] for name in sampling} == sampling
    assert sent["ignore_eos"] is True


async def test_headers_of_the_client_go_with_every_request(run, inference):
    (rollout,) = await run("ok")
    assert rollout.failure is None
    assert inference.headers["/inference/v1/generate"]["x-team"] == "blue"
    assert inference.headers["/inference/v1/generate"]["x-session-id"]


@pytest.mark.parametrize(("level", "heard"), [("info", ["told", "warned"]), ("warning", ["warned"])])
async def test_the_library_speaks_into_our_log_from_its_level_up(inference, modules, caplog, level, heard):
    for api in ("classic", "v1"):
        spec = spec_of(inference, f"faulty-{api}", answers=["ok"])
        environment = await verifiers.load(msgspec.structs.replace(spec, library_log_level=level))
        await environment.close()
        caplog.clear()
        library = logging.getLogger(f"verifiers.{api}")
        library.info("told")
        library.warning("warned")
        assert caplog.messages == heard


async def test_a_completion_cut_at_its_limit_is_marked_as_truncated(run, inference):
    inference.reply = lambda text: "abcdefgh"
    (rollout,) = await run("ok", sampling={"temperature": 1.0, "max_tokens": 3})
    assert rollout.failure is None
    assert rollout.truncated
    assert len(rollout.turns[0].completion_ids) == 3


async def test_every_kind_of_fault_comes_back_as_a_failure_of_that_kind(run, inference):
    faults = {
        "say 500": JSONResponse({"error": {"message": "boom"}}, 500),
        "say malformed": JSONResponse({"choices": [{"token_ids": [5]}]}),
        "say mute": JSONResponse({"choices": []}),
        "say silent": JSONResponse(
            {"choices": [{"token_ids": [], "logprobs": {"content": []}, "finish_reason": "stop"}]}
        ),
    }
    inference.fault = lambda text, number: faults.get(text)
    expected = {
        "ok": None,
        "raise": FailureKind.ENVIRONMENT,
        "scorer": FailureKind.SCORER,
        "nan": FailureKind.BAD_REWARD,
        "500": FailureKind.INFERENCE,
        "malformed": FailureKind.INFERENCE,
        "mute": FailureKind.INFERENCE,
        "silent": FailureKind.EMPTY if run.api == "classic" else FailureKind.INFERENCE,
    }
    rollouts = await run(*expected)
    found = dict(zip(expected, rollouts, strict=True))
    assert {answer: rollout.failure and rollout.failure.kind for answer, rollout in found.items()} == expected
    assert "scorer broke" in str(found["scorer"].failure)
    assert "environment broke" in str(found["raise"].failure)
    assert "boom" in str(found["500"].failure)
    assert all(rollout.reward != rollout.reward for rollout in rollouts if rollout.failure), "a failure has no reward"


async def test_a_turn_in_which_the_model_says_nothing_is_a_turn_that_is_scored(run, inference):
    inference.reply = lambda text: ""
    (rollout,) = await run("ok")
    assert rollout.failure is None
    assert rollout.reward == 1.0
    assert inference.tokenizer.decode(rollout.turns[0].completion_ids) == "<|im_end|>"


async def test_a_prompt_longer_than_the_models_context_is_too_long(run, inference):
    (rollout,) = await run("x" * 600)
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.TOO_LONG


async def test_a_server_that_is_gone_is_an_inference_failure(run, inference):
    inference.base_url = "http://127.0.0.1:9/v1"
    (rollout,) = await run("ok")
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.INFERENCE


async def test_a_proxy_of_the_surroundings_is_not_asked(run, inference, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (rollout,) = await run("ok")
    assert rollout.failure is None


@pytest.mark.parametrize("api", ["classic", "v1"])
async def test_reverse_text_runs_in_both_forms_on_both_splits(inference, api):
    environment = await verifiers.load(spec_of(inference, "reverse-text", api, num_examples=3))
    try:
        for split in ("train", "eval"):
            request = RolloutRequest(id=1, example=2, sampling={}, version=0, timeout_s=30, split=split)
            rollout = await environment.run(request)
            assert rollout.reward == 1.0, rollout
        assert environment.has_eval_split
        assert environment.num_train == 3
    finally:
        await environment.close()


@pytest.mark.parametrize("api", ["classic", "v1"])
async def test_an_environment_that_evaluates_on_its_training_data_says_so(modules, inference, api):
    environment = await verifiers.load(spec_of(inference, f"faulty-{api}", answers=["ok"]))
    assert (environment.num_train, environment.num_eval, environment.has_eval_split) == (1, 1, False)
    await environment.close()


async def test_an_environment_that_lies_there_is_refused_with_the_command_that_installs_it(
    inference, tmp_path, monkeypatch
):
    (tmp_path / "environments" / "their_env").mkdir(parents=True)
    (tmp_path / "environments" / "their_env" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EnvironmentSetupError, match=r"Install it: pip install -e \./environments/their_env, or correct"
    ):
        await verifiers.load(spec_of(inference, "their-env"))


async def test_an_environment_of_the_hub_is_the_module_of_its_name(modules, inference):
    environment = await verifiers.load(spec_of(inference, "team/faulty-v1@latest", answers=["ok"]))
    assert environment.num_train == 1
    await environment.close()


async def test_a_classic_environment_has_no_agent(modules, inference):
    spec = msgspec.structs.replace(spec_of(inference, "faulty-classic", answers=["ok"]), agent={"max_turns": 3})
    with pytest.raises(
        EnvironmentSetupError, match="classic API, which has no agents; remove agent of environment 'env'"
    ):
        await verifiers.load(spec)


@pytest.mark.parametrize(
    ("env_id", "args", "reason"),
    [
        ("no-such-env", {}, "'no-such-env' is not installed: there is no module 'no_such_env'. Install its package"),
        (
            "team/no-such-env@1.2",
            {},
            r"no module 'no_such_env'. .* prime env install team/no-such-env@1\.2 \(pip install",
        ),
        ("team/faulty-v1@1.2", {"answers": ["ok"]}, r"installed is faulty-v1 of no version, not 1\.2"),
        ("broken-env", {}, "needs 'no_such_dependency', which is not installed"),
        ("raising-env", {}, r"cannot be imported: RuntimeError\('bad luck'\)"),
        ("faulty-classic", {"anwsers": []}, "unexpected keyword argument 'anwsers'"),
        ("faulty-v1", {"anwsers": []}, "anwsers"),
        ("faulty-v1", {"answers": []}, "has no examples"),
        ("lazy-env", {}, r"'lazy-env' cannot be loaded with args \{\}: TypeError: rows of the wrong type"),
    ],
)
async def test_an_environment_that_cannot_be_used_is_refused_in_words(modules, inference, env_id, args, reason):
    with pytest.raises(EnvironmentSetupError, match=reason):
        await verifiers.load(spec_of(inference, env_id, **args))
