"""By how much the event loop of this process is late: time in which every rollout, timer and connection had to wait."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from statistics import fmean
from typing import Final

from prime_rl import activity

INTERVAL_S: Final = 0.05
MAX_KEPT: Final = 100_000
"""Lags that are kept between two rows of metrics: those of more than an hour."""


class LoopLag:
    """Measures the lag of the running event loop, since the last row of metrics.

    Example: a callback that computes for 200 ms -> event_loop_lag/max of about 0.2 seconds
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lags: deque[float] = deque(maxlen=MAX_KEPT)

    # Consumes: nothing. Waits for: the next beat. Unblocked by: time.
    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            activity.loop_beat()
            self._lags.append(max(0.0, loop.time() - due))

    def take(self) -> dict[str, float]:
        """Statistics in seconds since the last call; none when nothing was measured."""
        lags, self._lags = sorted(self._lags), deque(maxlen=MAX_KEPT)
        if not lags:
            return {}
        return {
            "event_loop_lag/mean": fmean(lags),
            "event_loop_lag/p90": _percentile(lags, 90),
            "event_loop_lag/p99": _percentile(lags, 99),
            "event_loop_lag/max": lags[-1],
        }


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
