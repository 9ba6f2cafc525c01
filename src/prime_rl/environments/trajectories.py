"""Rollouts to training samples. Pure.

interleaved: a turn whose prompt begins with everything the previous turns saw and sampled continues their sample, so a
conversation of n turns costs its own length once. Where a prompt does not extend what came before (a template that
rewrites history, a compacted context), a new sample starts.

branching: every turn is a sample, its prompt the context and its completion trained on.

Token ids are those that the server worked on: nothing is tokenized again, so what is trained on is what was sampled.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from prime_rl.data.samples import NOT_SAMPLED, TrainingSample
from prime_rl.environments.rollouts import Rollout, Turn

Strategy = Literal["interleaved", "branching"]


def training_samples(
    rollout: Rollout, *, advantage: float, temperature: float, strategy: Strategy = "interleaved"
) -> list[TrainingSample]:
    """The samples of a rollout that did not fail, in the order of its turns.

    Example: prompt [5, 9] -> [7, 2], then prompt [5, 9, 7, 2, 4] -> [8] gives, interleaved, the sample
    [5, 9, 7, 2, 4, 8] with the loss mask [F, F, T, T, F, T], and branching, the samples [5, 9, 7, 2] and
    [5, 9, 7, 2, 4, 8] with the loss masks [F, F, T, T] and [F, F, F, F, F, T].
    """
    assert rollout.failure is None, "a failed rollout is never trained on"
    chains: list[_Chain] = []
    for turn in rollout.turns:
        chain = None
        if strategy == "interleaved":
            chain = next((chain for chain in chains if chain.is_extended_by(turn)), None)
        if chain is None:
            chain = _Chain()
            chains.append(chain)
        chain.append(turn)
    return [
        TrainingSample(
            token_ids=np.array(chain.token_ids, np.int32),
            loss_mask=np.array([version != NOT_SAMPLED for version in chain.versions], np.bool_),
            logprobs=np.array(chain.logprobs, np.float32),
            versions=np.array(chain.versions, np.int32),
            temperature=temperature,
            advantage=advantage,
            reward=rollout.reward,
            env_name=rollout.env,
            rollout_id=f"{rollout.id}/{index}" if len(chains) > 1 else str(rollout.id),
        )
        for index, chain in enumerate(chains)
    ]


def longest_sample(rollout: Rollout) -> int:
    """Tokens of the longest sample of the rollout, by either strategy: that of its longest turn, prompt included."""
    return max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in rollout.turns), default=0)


class _Chain:
    """The tokens of one sample while its turns are put end to end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def is_extended_by(self, turn: Turn) -> bool:
        return turn.prompt_ids[: len(self.token_ids)] == self.token_ids

    def append(self, turn: Turn) -> None:
        between = turn.prompt_ids[len(self.token_ids) :]
        self.token_ids += [*between, *turn.completion_ids]
        self.logprobs += [*([0.0] * len(between)), *turn.logprobs]
        self.versions += [*([NOT_SAMPLED] * len(between)), *turn.versions]
