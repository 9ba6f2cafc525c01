"""What verifiers makes a reward of 0 of, scored by its own rubrics."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import verifiers.legacy as vf
from datasets import Dataset
from verifiers.legacy.rubrics.experimental.hybrid_math_rubric import HybridMathRubric

from prime_rl.environments.verifiers.scorers import noted, watched_rubrics


def state_of(answer="4", said="\\boxed{4}", **info):
    return vf.State(
        prompt=[{"role": "user", "content": "2 + 2?"}],
        completion=[{"role": "assistant", "content": said}],
        answer=answer,
        info=info,
        trajectory=[],
    )


async def scored(rubric, state):
    with noted() as errors:
        try:
            await rubric.score_rollout(state)
        except Exception as error:  # noqa: BLE001 - as the door does
            errors.append(error)
    return errors


def nothing(completion):
    return None


def words(completion):
    return "very good"


@pytest.mark.parametrize(("function", "said"), [(nothing, "None"), (words, "'very good'")])
async def test_a_reward_function_that_returns_no_number_is_an_error(function, said):
    rubric = vf.Rubric(funcs=[function])
    watched_rubrics(rubric)
    state = state_of()
    (error,) = await scored(rubric, state)
    assert state["reward"] == 0.0, "what verifiers makes of it"
    assert str(error) == f"the reward function {function.__name__} returned {said}, which is no number"


@pytest.mark.parametrize("number", [True, 1, "0.5"])
async def test_what_verifiers_takes_for_a_number_is_one(number):
    def good(completion):
        return number

    rubric = vf.Rubric(funcs=[good])
    watched_rubrics(rubric)
    state = state_of()
    assert await scored(rubric, state) == []
    assert state["reward"] == float(number)


@pytest.mark.parametrize("kind", [vf.MathRubric, HybridMathRubric])
async def test_a_math_rubric_whose_process_was_killed_is_an_error_and_has_another_one_next_time(kind):
    rubric = kind(timeout_seconds=20)
    watched_rubrics(rubric)
    holder = getattr(rubric, "math_rubric", rubric)
    try:
        state = state_of()
        assert await scored(rubric, state) == []
        assert state["reward"] == 1.0
        for pid in list(holder.executor._processes):
            os.kill(pid, signal.SIGKILL)
        while not holder.executor._broken:  # noqa: ASYNC110 - a thread of the pool notices
            await asyncio.sleep(0.01)
        state = state_of()
        assert await scored(rubric, state) == []
        assert state["reward"] == 1.0
        wrong = state_of(said="\\boxed{5}")
        assert await scored(rubric, wrong) == []
        assert wrong["reward"] == 0.0
    finally:
        await rubric.teardown()


async def test_a_call_that_breaks_its_pool_of_processes_is_an_error_and_no_wrong_answer():
    rubric = vf.MathRubric()

    async def correct(completion):
        """As `MathRubric` does: an exception is no correct answer."""
        try:
            await asyncio.get_running_loop().run_in_executor(rubric.executor, os._exit, 3)
        except Exception:  # noqa: BLE001
            return 0.0

    rubric.funcs = [correct]
    watched_rubrics(rubric)
    try:
        (error,) = await scored(rubric, state_of())
        assert type(error).__name__ == "BrokenProcessPool"
    finally:
        await rubric.teardown()


class Judge:
    def __init__(self, content, **fields):
        self.message = SimpleNamespace(content=content, **fields)

    async def create(self, **arguments):
        return SimpleNamespace(choices=[SimpleNamespace(message=self.message, finish_reason="length")])


@pytest.mark.parametrize("content", [None, ""])
async def test_a_judge_that_says_nothing_is_an_error(content):
    client = SimpleNamespace(chat=SimpleNamespace(completions=Judge(content)))
    rubric = vf.JudgeRubric(judge_client=client)

    async def right(prompt, completion, answer, state, judge):
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric.add_reward_func(right)
    watched_rubrics(vf.RubricGroup([rubric]))
    (error,) = await scored(rubric, state_of())
    assert "the judge's answer holds no text (finish_reason 'length')" in str(error)
    client.chat.completions.message.content = "yes"
    state = state_of()
    assert await scored(rubric, state) == []
    assert state["reward"] == 1.0


def good(completion):
    return 1.0


def group_of(**environments):
    return vf.EnvGroup(list(environments.values()), env_names=list(environments))


async def test_a_group_of_environments_in_another_which_verifiers_scores_as_0_is_an_error():
    def single():
        data = Dataset.from_list([{"question": "q", "answer": "a"}])
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[good]))

    one = group_of(a=single())
    watched_rubrics(one.rubric)
    state = state_of(env_id="a")
    assert await scored(one.rubric, state) == []
    assert state["reward"] == 1.0
    nested = group_of(outer=group_of(inner=single()))
    watched_rubrics(nested.rubric)
    (error,) = await scored(nested.rubric, state_of(env_id=["outer", "inner"]))
    assert str(error) == "the group of environments ['inner'] has none that is named 'outer'"
