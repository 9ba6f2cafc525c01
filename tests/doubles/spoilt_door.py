"""`door`, with rollouts that end well and still cannot be trained on, or cannot in the first scoring of their group."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from prime_rl.environments.rollouts import EnvironmentSpec, Failure, FailureKind, Rollout, RolloutRequest
from tests.doubles.door import Scripted

SPOILT: Final[dict[Any, dict[str, Any]]] = {
    "above zero": {"logprobs": [-0.5, 0.5, -0.5]},
    "not a number": {"logprobs": [-0.5, float("nan"), -0.5]},
    "below float32": {"logprobs": [-0.5, -1e39, -0.5]},
    "a sum below float64": {"logprobs": [-sys.float_info.max] * 3},
    "weights of the future": {"versions": [10_000] * 3},
    "weights that are no int32": {"versions": [0, 0, 2**31]},
    "a logprob too few": {"logprobs": [-0.5, -0.5]},
    "a negative token": {"completion_ids": [5, -5, 5]},
    "no prompt": {"prompt_ids": []},
}
"""What the turns of a rollout have instead, by the word of its example."""
OVERPAID: Final[dict[Any, float]] = {
    "above float32": 1e39,
    "below float32 squared": -1e160,
    "not a reward": float("nan"),
}
"""Rewards, by the word of the example."""


class Spoilt(Scripted):
    """More words for the script: those of `SPOILT` and `OVERPAID`; exit-once (the file `args["marker"]` tells that it
    was once); and nan-once and spoilt-once where groups are scored as one: in the first scoring of such an example, one
    of the group has no reward, or a logprob above 0."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        super().__init__(spec)
        self._num_scorings: Counter[int] = Counter()

    async def run(self, request: RolloutRequest) -> Rollout:
        what = self._script[request.example % len(self._script)]
        if what == "exit-once":
            _exit_once(Path(self._spec.args["marker"]))
        rollout = await super().run(request)
        if (instead := SPOILT.get(what)) is not None:
            turns = [msgspec.structs.replace(turn, **instead) for turn in rollout.turns]
            rollout = msgspec.structs.replace(rollout, turns=turns)
        return msgspec.structs.replace(rollout, reward=OVERPAID.get(what, rollout.reward))

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        rollouts = await super().score(rollout_ids)
        example = rollouts[-1].example
        self._num_scorings[example] += 1
        what = self._script[example % len(self._script)]
        if self._num_scorings[example] > 1:
            return rollouts
        if what == "nan-once":
            failure = Failure(kind=FailureKind.BAD_REWARD, message="the reward is nan")
            rollouts[-1] = msgspec.structs.replace(rollouts[-1], failure=failure)
        if what == "spoilt-once":
            turns = [msgspec.structs.replace(turn, logprobs=[0.5] * 3) for turn in rollouts[0].turns]
            rollouts[0] = msgspec.structs.replace(rollouts[0], turns=turns)
        return rollouts


def _exit_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os._exit(7)


async def load(spec: EnvironmentSpec) -> Spoilt:
    return Spoilt(spec)
