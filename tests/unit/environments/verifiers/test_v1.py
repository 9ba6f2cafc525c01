"""Tasksets of verifiers' v1 API, through the door, over a real HTTP server."""

import math
import os
import sys
from pathlib import Path

import msgspec
import nltk
import pytest
from starlette.responses import JSONResponse
from tests.doubles.inference import END
from tests.unit.environments.verifiers.playing import importable, load, request_of, roll

from prime_rl.environments.rollouts import FailureKind
from prime_rl.environments.trajectories import training_samples

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODULES = {
    "dialogue_v1": """
        import sys
        import verifiers.v1 as vf

        PROGRAM = '''
        import json, sys, urllib.request
        endpoint, key, prompt = sys.argv[1:]
        messages = [{"role": "user", "content": prompt}]
        for turn in range(3):
            body = json.dumps({"model": "m", "messages": messages}).encode()
            headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
            request = urllib.request.Request(endpoint + "/chat/completions", body, headers)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            answer = json.load(opener.open(request))
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "turn %d" % (turn + 1)})
        '''

        class DialogueHarness(vf.Harness[vf.HarnessConfig]):
            APPENDS_SYSTEM_PROMPT = True
            EXECUTES_CODE = False
            NEEDS_CONTAINER = False

            async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
                import textwrap
                program = textwrap.dedent(PROGRAM)
                return await runtime.run_program([sys.executable, "-c", program, endpoint, secret, data.prompt], {})

        class DialogueConfig(vf.TasksetConfig):
            score_s: float = 0.0

        class DialogueData(vf.TaskData):
            score_s: float

        class DialogueTask(vf.Task[DialogueData]):
            @vf.reward
            async def turns(self, trace) -> float:
                import asyncio
                await asyncio.sleep(self.data.score_s)
                return trace.num_turns / 3

        class DialogueTaskset(vf.Taskset[DialogueTask, DialogueConfig]):
            def load(self):
                yield DialogueTask(
                    DialogueData(idx=0, prompt="hello", score_s=self.config.score_s), self.config.task
                )

        __all__ = ["DialogueTaskset", "DialogueHarness"]
    """,
    "own_v1": """
        import verifiers.v1 as vf
        from dialogue_v1 import DialogueConfig, DialogueHarness, DialogueTask, DialogueTaskset

        class OwnTaskset(DialogueTaskset):
            pass

        class OwnHarness(DialogueHarness):
            pass

        class OwnConfig(vf.EnvConfig):
            solver: vf.AgentConfig = vf.AgentConfig()

        class OwnEnv(vf.Env[OwnConfig]):
            async def run(self, task, agents):
                await agents.solver.run(task)
                if task.data.score_s:
                    await agents.solver.run(task)

            async def finalize(self, task, episode):
                for trace in episode.traces:
                    trace.record_reward("own", 1.0)

        __all__ = ["OwnTaskset", "OwnHarness", "OwnEnv"]
    """,
    "faulty_calls_v1": """
        import asyncio
        import verifiers.v1 as vf
        from dialogue_v1 import DialogueHarness

        PROGRAM = '''
        import json, sys, threading, urllib.error, urllib.request
        endpoint, key, then = sys.argv[1:]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def say(text):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
            headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
            try:
                opener.open(urllib.request.Request(endpoint + "/chat/completions", body, headers)).read()
            except urllib.error.HTTPError:
                if then == "again":
                    say(text)

        if then == "twice at once":
            threads = [threading.Thread(target=say, args=("same",)) for _ in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        else:
            [say(text) for text in ("one", "two", "three")]
        '''

        class FaultyCallsHarness(DialogueHarness):
            async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
                import sys, textwrap
                program = textwrap.dedent(PROGRAM)
                return await runtime.run_program([sys.executable, "-c", program, endpoint, secret, data.prompt], {})

        class FaultyCallsConfig(vf.TasksetConfig):
            then: str

        class FaultyCallsTask(vf.Task[vf.TaskData]):
            @vf.reward
            async def turns(self, trace) -> float:
                return float(trace.num_turns)

        class FaultyCallsTaskset(vf.Taskset[FaultyCallsTask, FaultyCallsConfig]):
            def load(self):
                yield FaultyCallsTask(vf.TaskData(idx=0, prompt=self.config.then), self.config.task)

        __all__ = ["FaultyCallsTaskset", "FaultyCallsHarness"]
    """,
    "half_scored_v1": """
        import verifiers.v1 as vf

        class HalfConfig(vf.TasksetConfig):
            kind: str = "half scored"

        class JudgedTask(vf.Task[vf.TaskData]):
            @vf.reward
            async def right(self, trace) -> float:
                said = "yes" if trace.last_reply == "ask" else ""  # in place of a call
                trace.record_judge(vf.JudgeResponse(text=said))
                return float(said == "yes")

        class HalfTask(vf.Task[vf.TaskData]):
            async def score(self, trace, runtime=None):
                trace.rewards["never given"] = None
                trace.record_reward("given", 1.0)

        class RewritingTask(vf.Task[vf.TaskData]):
            @vf.intercept
            def hide(self, response: vf.Response):
                message = vf.AssistantMessage(content="hidden")
                return response.model_copy(update={"message": message})

            @vf.reward
            async def good(self, trace) -> float:
                return 1.0

        class HalfTaskset(vf.Taskset[vf.Task, HalfConfig]):
            def load(self):
                kinds = {"half scored": HalfTask, "rewriting": RewritingTask, "judged": JudgedTask}
                yield kinds[self.config.kind](vf.TaskData(idx=0, prompt="hello"), self.config.task)

        __all__ = ["HalfTaskset"]
    """,
}


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    with importable(tmp_path_factory.mktemp("tasksets"), MODULES):
        yield


async def test_a_taskset_is_played_by_the_harness_that_it_brings(inference):
    inference.version = 3
    inference.reply = lambda text: f"said {text}"
    requests = [msgspec.structs.replace(request_of(0), version=3, servers=(inference.base_url,))]
    (rollout,) = await roll(inference, "dialogue-v1", requests=requests)
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0
    assert [message["content"] for message in rollout.messages] == [
        "hello", "said hello", "turn 1", "said turn 1", "turn 2", "said turn 2",
    ]  # fmt: skip
    assert len(rollout.turns) == 3
    assert {version for turn in rollout.turns for version in turn.versions} == {3}
    (sample,) = training_samples(rollout, advantage=1.0, temperature=1.0)
    said = inference.tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert said == f"said hello{END}said turn 1{END}said turn 2{END}"


async def test_a_taskset_is_played_in_the_environment_that_it_brings(inference):
    (rollout,) = await roll(inference, "own-v1", agent={"max_turns": 2})
    assert rollout.failure is None, rollout.failure
    assert len(rollout.turns) == 2
    assert rollout.reward == pytest.approx(1.0 + 2 / 3)
    (several,) = await roll(inference, "own-v1", args={"score_s": 0.01})
    assert several.failure is not None
    assert several.failure.message == "2 agents took part, 2 of them to be trained; it must be one, and that one"


async def test_a_harness_finds_another_server_when_its_own_is_lost(inference):
    (rollout,) = await roll(
        inference, "dialogue-v1", requests=[request_of(0, servers=("http://127.0.0.1:9/v1", inference.base_url))],
        base_urls=("http://127.0.0.1:9/v1", inference.base_url),
    )  # fmt: skip
    assert rollout.failure is None, rollout.failure
    assert rollout.failovers == 1


async def test_the_agent_of_a_taskset_can_be_told_what_to_do(inference):
    (rollout,) = await roll(inference, "dialogue-v1", agent={"max_turns": 2})
    assert len(rollout.turns) == 2
    assert rollout.stop_reason == "max_turns"


async def test_scoring_of_a_taskset_ends_at_its_deadline(inference):
    (rollout,) = await roll(inference, "dialogue-v1", args={"score_s": 60.0}, score_timeout_s=0.2)
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.SCORER_TIMEOUT
    assert rollout.failure.message == "scoring took longer than 0.2 s"


async def test_without_scoring_a_rollout_has_the_reward_0_whatever_its_environment_records(inference):
    requests = [request_of(0, is_scored=False)]
    (rollout,) = await roll(inference, "dialogue-v1", requests=requests, args={"score_s": 100.0})
    assert (rollout.failure, rollout.reward, len(rollout.turns)) == (None, 0.0, 3)
    (rollout,) = await roll(inference, "own-v1", requests=requests)
    assert (rollout.failure, rollout.reward, len(rollout.turns)) == (None, 0.0, 3)


async def test_equal_answers_to_equal_prompts_are_two_turns_each_trained_on_once(inference):
    inference.reply = lambda text: "yes"
    (rollout,) = await roll(inference, "faulty-calls-v1", args={"then": "twice at once"})
    assert rollout.failure is None, rollout.failure
    first, second = rollout.turns
    assert first == second
    samples = training_samples(rollout, advantage=1.0, temperature=1.0)
    said = [inference.tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in samples]
    assert said == [f"yes{END}"] * 2
    assert inference.num_requests == 2


def error_at(inference, *requests):
    boom = JSONResponse({"error": {"message": "boom"}}, 500)
    inference.fault = lambda text, number: boom if number in requests else None


async def test_a_program_that_goes_on_without_the_answer_to_a_call_played_no_rollout(inference):
    error_at(inference, 2)
    (rollout,) = await roll(inference, "faulty-calls-v1", args={"then": "on"})
    assert inference.num_requests == 3
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.INFERENCE
    assert "boom" in rollout.failure.message
    assert math.isnan(rollout.reward)


async def test_a_program_that_makes_a_failed_call_again_plays_on(inference):
    error_at(inference, 2)
    (rollout,) = await roll(inference, "faulty-calls-v1", args={"then": "again"})
    assert inference.num_requests == 4
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, len(rollout.turns)) == (3.0, 3)


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
async def test_an_answer_with_another_number_of_logprobs_than_tokens_is_a_failure(inference, num_logprobs):
    content = [{"token": "token_id:5", "logprob": -0.5, "top_logprobs": []}] * num_logprobs
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "stop"}
    inference.fault = lambda text, number: JSONResponse({"request_id": "r", "choices": [choice]})
    (rollout,) = await roll(inference, "dialogue-v1")
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.INFERENCE


async def test_a_reward_that_was_never_given_makes_no_sum_of_the_others(inference):
    (rollout,) = await roll(inference, "half-scored-v1")
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.BAD_REWARD


async def test_answers_that_the_taskset_replaces_cannot_be_learned_from(inference):
    (rollout,) = await roll(inference, "half-scored-v1", args={"kind": "rewriting"})
    assert rollout.failure is not None
    assert rollout.failure.kind == FailureKind.ENVIRONMENT
    assert "replaces answers of the model" in rollout.failure.message


async def test_a_judge_that_says_nothing_gives_no_reward(inference):
    for reply, kind in (("ask", None), ("do not", FailureKind.SCORER)):
        inference.reply = lambda text, reply=reply: reply
        (rollout,) = await roll(inference, "half-scored-v1", args={"kind": "judged"})
        assert (rollout.failure and rollout.failure.kind) == kind
        assert rollout.reward == 1.0 or math.isnan(rollout.reward)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """What would be fetched is there: uv would install into an environment of its own what this one has, and nltk would
    load down a list of words."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in {"pip": "exit 0", "uv": f'[ "$1" = sync ] || echo "{sys.executable}"'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    monkeypatch.setenv("HOME", str(tmp_path))  # verifiers puts ~/.local/bin first
    words = Path(tmp_path, "nltk", "corpora", "words")
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("pear\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: True)


async def test_a_taskset_and_a_harness_as_verifiers_ships_them(inference, offline):
    """`textarena` plays Hangman, its own environment being the user; the `null` harness is resumed turn by turn."""
    inference.context = 4096
    guesses = ["[P] first", "[X] then", "[pear] is it"]
    inference.reply = lambda text: guesses[inference.num_requests - 1]
    environment = await load(
        inference, "textarena", args={"game": "Hangman-v0"}, agent={"harness": {"id": "null"}}, retry_s=5.0
    )
    try:
        rollout = await environment.run(request_of(0, 3))
    finally:
        await environment.close()
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, len(rollout.turns)) == (1.0, 3)
    roles = [message["role"] for message in rollout.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert all("P   _   _   _" in rollout.messages[place]["content"] for place in (3, 5))
    samples = training_samples(rollout, advantage=1.0, temperature=1.0)
    said = [inference.tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in samples]
    assert "".join(said) == "".join(guess + END for guess in guesses)


async def test_an_example_has_the_columns_of_its_task(inference):
    environment = await load(inference, "dialogue-v1")
    try:
        assert environment.example(0)["prompt"] == "hello"
    finally:
        await environment.close()
