"""How many rollouts run at once, whose they are, and how many start in a minute. Pure: the time is passed in."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping

MINUTE_S = 60.0


class Concurrency:
    """Room for rollouts, shared by sources of them.

    While several sources want room, each is left its share of it, as soon as rollouts of the others end; what a source
    does not want, the others may use.
    """

    def __init__(
        self, bound: int | None, shares: Mapping[str, float], *, usual: int, least: Mapping[str, int] | None = None
    ) -> None:
        """`bound`: rollouts of all sources together; None: the first source bounds itself, to about `usual`.

        `shares`: of each source, above 0; together 1. `least`: of sources whose rollouts wait for each other, how many
        must have room at once.
        """
        assert math.isclose(sum(shares.values()), 1), shares
        self._least = dict.fromkeys(shares, 1) | dict(least or {})
        self.floor = sum(self._least.values()) if least else 1
        """The lowest bound that there may be."""
        self._bound = bound
        self.in_flight: Counter[str] = Counter()
        self._num_started = 0
        self._last: Counter[str] = Counter()
        """When the last one of each source started, in numbers of starts."""
        self._shares = dict(shares)
        self._first = next(iter(shares))
        self._usual = usual

    @property
    def bound(self) -> int | None:
        """Rollouts of all sources together. It may be changed at any time, and is the floor where it is set to less.

        What runs beyond a lower bound is not cancelled.
        """
        return self._bound

    @bound.setter
    def bound(self, bound: int | None) -> None:
        self._bound = None if bound is None else max(bound, self.floor)

    def next_of(self, wanting: Collection[str]) -> list[str]:
        """The sources of `wanting` of which a rollout may start now: least of its share first, then longest waited."""
        return sorted(
            (source for source in wanting if self.may_start(source, wanting)),
            key=lambda source: (self.in_flight[source] / self.quota(source), self._last[source]),
        )

    def may_start(self, source: str, wanting: Collection[str]) -> bool:
        """Whether a rollout of `source` may start while the sources `wanting` want to start some, too."""
        if self._bound is None and source == self._first:
            return True
        others = [other for other in self._shares if other != source and other in wanting]
        reserved = sum(max(0, self.quota(other) - self.in_flight[other]) for other in others)
        if self._room < len(self._shares):
            reserved = 0  # they take turns
        return self._room - self.in_flight.total() > reserved

    def quota(self, source: str) -> int:
        """Rollouts that `source` may always have in flight, as long as there is room for one of every source."""
        most = self._room - sum(least for other, least in self._least.items() if other != source)
        return max(self._least[source], min(int(self._room * self._shares[source]), most))

    @property
    def _room(self) -> int:
        if self._bound is not None:
            return self._bound
        return math.ceil(self._usual / self._shares[self._first])

    def start(self, source: str) -> None:
        self._num_started += 1
        self._last[source] = self._num_started
        self.in_flight[source] += 1

    def end(self, source: str) -> None:
        self.in_flight[source] -= 1


class RateLimit:
    """At most so many starts in any 60 seconds. Times are seconds of one clock, which never go back."""

    def __init__(self, per_minute: int) -> None:
        self._starts: deque[float] = deque(maxlen=per_minute)

    def wait_s(self, now: float) -> float:
        """Seconds until one may start; 0: now."""
        if len(self._starts) < (self._starts.maxlen or 0):
            return 0.0
        return max(0.0, self._starts[0] + MINUTE_S - now)

    def start(self, now: float) -> None:
        """One starts."""
        self._starts.append(now)
