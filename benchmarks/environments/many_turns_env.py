"""A classic verifiers environment of many turns that costs next to nothing itself: for measuring what is around it."""

from pathlib import Path

import verifiers as vf
from datasets import Dataset
from watching import SamplerToFile


class ManyTurnsEnv(vf.MultiTurnEnv):
    """Says "go on" after each turn, until there were `max_turns`.

    The first `num_short` rollouts of a worker are shorter: of as many turns as their example says, 1 to `max_turns`.
    So rollouts that begin at once do not end at once, and from then on as many end at any time as at any other.
    """

    def __init__(self, *, num_short: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self._num_short = num_short

    async def setup_state(self, state: vf.State) -> vf.State:
        state["num_turns"] = self.max_turns
        if self._num_short > 0:
            self._num_short -= 1
            state["num_turns"] = 1 + state["example_id"] % self.max_turns
        return state

    @vf.stop
    async def max_turns_reached(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= state["num_turns"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        return [vf.UserMessage(content="go on")]


async def first_letter(state: vf.State) -> float:
    """The reward: where in the alphabet the first answer begins, 0 to 1."""
    text = str(state["trajectory"][0]["completion"][-1].content or "a")
    return (ord(text[0]) - ord("a")) / 25


def load_environment(
    num_turns: int = 16, num_examples: int = 512, num_short: int = 0, profile_dir: str | None = None
) -> vf.Environment:
    """`profile_dir`: where the worker says what its CPU time goes to."""
    if profile_dir is not None:
        SamplerToFile(Path(profile_dir)).start()
    rows = [{"question": f"talk about {'abcdefghij'[number % 10] * 8}", "answer": ""} for number in range(num_examples)]
    return ManyTurnsEnv(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[first_letter]),
        max_turns=num_turns,
        num_short=num_short,
    )
