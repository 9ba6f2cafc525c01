"""How many workers a pool has. Pure: the time is passed in.

One worker carries `rollouts_per_worker` rollouts, or fewer where that turned out to be too many: its event loop was
late, because the environment computes much itself. So a pool follows the number of its rollouts up at once, and down
after a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRules:
    """When a pool grows and shrinks."""

    most: int
    """Workers at most; at least there is one."""
    rollouts_per_worker: int = 64
    max_lag_s: float = 0.25
    """An event loop that is late by more has too much to do."""
    settle_s: float = 10.0
    """Seconds between a change and the next judgement of lag: a worker that was started must get rollouts first."""
    idle_s: float = 60.0
    """Seconds that fewer workers would have been enough before one is let go."""


class Sizing:
    """The size of one pool."""

    def __init__(self, rules: SizingRules) -> None:
        self._rules = rules
        self._capacity = rules.rollouts_per_worker
        self._changed_at = -math.inf
        self._calm_since: float | None = None

    @property
    def capacity(self) -> int:
        """Rollouts that one worker is given while there are, or will be, others."""
        return self._capacity

    def size(self, now: float, *, num_workers: int, num_rollouts: int, lag_s: float) -> int:
        """How many workers there should be.

        `num_workers`: those there are, loading ones included; `num_rollouts`: in flight or waiting; `lag_s`: the
        largest lag of late. Call it now and then, and whenever a rollout has to wait.
        """
        rules = self._rules
        is_late = lag_s > rules.max_lag_s and num_rollouts > num_workers
        if is_late and num_workers < rules.most and now - self._changed_at >= rules.settle_s:
            self._capacity = max(1, min(self._capacity, num_rollouts // (num_workers + 1)))
        wanted = min(max(math.ceil(num_rollouts / self._capacity), 1), rules.most)
        if wanted > num_workers:
            self._calm_since = None
            self._changed_at = now
            return wanted
        if is_late or wanted == num_workers:
            self._calm_since = None
            return num_workers
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < rules.idle_s:
            return num_workers
        self._calm_since = self._changed_at = now
        return num_workers - 1
