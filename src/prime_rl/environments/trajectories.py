"""Rollouts to training samples. Pure.

interleaved: a turn whose prompt begins with everything the previous turns saw and sampled continues their sample, so a
conversation of n turns costs its own length once. Where a prompt does not extend what came before (a template that
rewrites history, a compacted context), a new sample starts.

branching: every turn is a sample, its prompt the context and its completion trained on.

Token ids are those that the server worked on: nothing is tokenized again, so what is trained on is what was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from prime_rl.data.samples import LOGPROB_TOLERANCE, NOT_SAMPLED, TrainingSample
from prime_rl.environments.rollouts import Rollout, Turn

Strategy = Literal["interleaved", "branching"]

MAX_INT32: Final = 2**31 - 1
MIN_LOGPROB: Final = float(np.finfo(np.float32).min)


@dataclass(slots=True)
class Chain:
    """The tokens of one sample: turns put end to end."""

    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T] 0 where the token was not sampled."""
    versions: list[int] = field(default_factory=list)
    """[T] `NOT_SAMPLED` where the token was not sampled."""
    sampled: list[tuple[int, int]] = field(default_factory=list)
    """The spans [start, end) of sampled tokens, one a turn."""

    def is_extended_by(self, turn: Turn) -> bool:
        return list(turn.prompt_ids[: len(self.token_ids)]) == self.token_ids

    def append(self, turn: Turn) -> None:
        between = turn.prompt_ids[len(self.token_ids) :]
        start = len(self.token_ids) + len(between)
        self.sampled.append((start, start + len(turn.completion_ids)))
        self.token_ids += [*between, *turn.completion_ids]
        self.logprobs += [*([0.0] * len(between)), *turn.logprobs]
        self.versions += [*([NOT_SAMPLED] * len(between)), *turn.versions]


def training_samples(
    rollout: Rollout, *, advantage: float, temperature: float, strategy: Strategy = "interleaved"
) -> list[TrainingSample]:
    """The samples of a rollout that did not fail, in the order of its turns.

    Example: prompt [5, 9] -> [7, 2], then prompt [5, 9, 7, 2, 4] -> [8] gives, interleaved, the sample
    [5, 9, 7, 2, 4, 8] with the loss mask [F, F, T, T, F, T], and branching, the samples [5, 9, 7, 2] and
    [5, 9, 7, 2, 4, 8] with the loss masks [F, F, T, T] and [F, F, F, F, F, T].
    """
    assert rollout.failure is None, "a failed rollout is never trained on"
    chains = merge_turns(rollout.turns, strategy)
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


def merge_turns(turns: Sequence[Turn], strategy: Strategy) -> list[Chain]:
    """The tokens of each sample. A turn is put to the first that its prompt begins with, the exact tokens of it."""
    chains: list[Chain] = []
    for turn in turns:
        chain = None
        if strategy == "interleaved":
            chain = next((chain for chain in chains if chain.is_extended_by(turn)), None)
        if chain is None:
            chain = Chain()
            chains.append(chain)
        chain.append(turn)
    return chains


def malformed(rollout: Rollout) -> str:
    """What is wrong with the tokens of a rollout that ended well, as an answer of a server may have it; "" for nothing.

    Example: "turn 1 has 3 sampled tokens, 2 logprobs and 3 versions"
    """
    before: tuple[int, ...] = ()
    for number, turn in enumerate(rollout.turns, 1):
        sampled, logprobs, versions = turn.completion_ids, turn.logprobs, turn.versions
        # What it shares with the turn before it, the same objects, was looked at: comparing them costs next to nothing.
        is_extended = before and turn.prompt_ids[: len(before)] == before
        new = turn.prompt_ids[len(before) :] if is_extended else turn.prompt_ids
        before = (*turn.prompt_ids, *sampled)
        if not len(sampled) == len(logprobs) == len(versions):
            return (
                f"turn {number} has {len(sampled)} sampled tokens, {len(logprobs)} logprobs and "
                f"{len(versions)} versions"
            )
        if not turn.prompt_ids:
            return f"turn {number} has no prompt"
        for token_ids in (new, sampled):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_INT32:
                return f"turn {number} has token ids from {min(token_ids)} to {max(token_ids)}"
        least, most = min(logprobs, default=0.0), max(logprobs, default=0.0)
        # A NaN among them may be neither, but is in their sum.
        if not MIN_LOGPROB <= least <= most <= LOGPROB_TOLERANCE or math.isnan(sum(logprobs)):
            wrong = next(one for one in logprobs if not MIN_LOGPROB <= one <= LOGPROB_TOLERANCE)
            return f"turn {number} has a logprob of {wrong}"
        oldest, newest = min(versions, default=0), max(versions, default=0)
        if not 0 <= oldest <= newest <= MAX_INT32:
            return f"turn {number} has a token of weights {oldest if oldest < 0 else newest}"
    return "" if rollout.num_completion_tokens else "no token was sampled"


def longest_sample(rollout: Rollout) -> int:
    """Tokens of the longest sample of the rollout, by either strategy: that of its longest turn, prompt included."""
    return max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in rollout.turns), default=0)
