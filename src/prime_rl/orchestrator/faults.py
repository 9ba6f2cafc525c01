"""Counts the failed rollouts of each environment and says when there are too many. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from prime_rl.environments.rollouts import Failure, FailureKind

MIN_JUDGED: Final = 64
"""Fewest rollouts that a verdict is based on."""
NOTICE_INTERVAL_S: Final = 10.0
"""A kind of failure is logged at most this often."""

Judged = Failure | Literal["lost"] | None
"""How a rollout ended. None: well. lost: well too, and another one made its group worthless."""


class FaultLedger:
    """The failures of one environment."""

    def __init__(self, max_error_rate: float, *, num_judged: int = MIN_JUDGED) -> None:
        """The last `num_judged` rollouts are judged, but never fewer than `MIN_JUDGED`."""
        self.counts: Counter[FailureKind] = Counter()
        """Failures since `take_counts`."""
        self._max_error_rate = max_error_rate
        self._num_judged = max(num_judged, MIN_JUDGED)
        self._recent: deque[Judged] = deque()
        self._num_failed = 0
        """Of the recent ones, with those that were lost."""
        self._noticed_at: dict[FailureKind, float] = {}
        self._unnoticed: Counter[FailureKind] = Counter()

    def take_counts(self) -> Counter[FailureKind]:
        """The failures by kind since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def succeeded(self, number: int = 1) -> None:
        """So many rollouts ended well."""
        for _ in range(number):
            self._note(None)

    def failed(self, failure: Failure, *, now: float, num_judged: int = 1) -> str | None:
        """Count a failure. Returns a line for the log when it is time for one about this kind again.

        `num_judged`: as how many rollouts it is judged: 0 where it says nothing about the environment, such as that of
        a lost server; all of a group that it made worthless.
        """
        self.counts[failure.kind] += 1
        self._unnoticed[failure.kind] += 1
        for _ in range(num_judged - 1):
            self._note("lost")
        if num_judged:
            self._note(failure)
        if now - self._noticed_at.get(failure.kind, -NOTICE_INTERVAL_S) < NOTICE_INTERVAL_S:
            return None
        self._noticed_at[failure.kind] = now
        number = self._unnoticed.pop(failure.kind)
        return f"{number} {'rollout' if number == 1 else 'rollouts'} failed, the last with {failure}"

    def snapshot(self) -> list[Judged]:
        """What the next verdict is based on."""
        return list(self._recent)

    def restore(self, recent: Sequence[Judged]) -> None:
        """Go on from a snapshot."""
        for one in recent:
            self._note(one)

    def verdict(self) -> str | None:
        """Why the run must stop: more than the allowed share of the judged rollouts failed, or all of them."""
        judged = len(self._recent)
        if judged < MIN_JUDGED:
            return None
        if self._num_failed > self._max_error_rate * judged:
            excess = f"more than max_error_rate = {self._max_error_rate:g} allows"
        elif self._num_failed == judged:
            excess = "which ends a run even with max_error_rate = 1"
        else:
            return None
        num_lost = self._recent.count("lost")
        lost = f" ({num_lost} of them were lost with another one of their group)" if num_lost else ""
        failures = (str(one) for one in self._recent if isinstance(one, Failure))
        commonest, number = Counter(failures).most_common(1)[0]
        return (
            f"{self._num_failed} of the last {judged} rollouts failed{lost}, {excess}; "
            f"most often ({number} times) with {commonest}"
        )

    def _note(self, end: Judged) -> None:
        self._recent.append(end)
        self._num_failed += end is not None
        if len(self._recent) > self._num_judged:
            self._num_failed -= self._recent.popleft() is not None


def take_all_counts(ledgers: Iterable[FaultLedger]) -> Counter[FailureKind]:
    """The failures by kind of all environments since the last call."""
    return sum((ledger.take_counts() for ledger in ledgers), Counter[FailureKind]())
