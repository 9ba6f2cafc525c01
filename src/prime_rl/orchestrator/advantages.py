"""Advantages: how much better a rollout was than the others of its group. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean reward of the group (Dr. GRPO, arXiv 2503.20783): nothing is divided by the spread.

    Example: group_advantages([1.0, 0.0, 0.5]) == [0.5, -0.5, 0.0]
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of three times 0.1 is not 0.1
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
