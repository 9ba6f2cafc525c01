"""Counts failed rollouts and says when there are too many. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from prime_rl.environments.rollouts import Failure, FailureKind

MIN_JUDGED: Final = 64
"""Fewest rollouts that a verdict is based on."""
NOTICE_INTERVAL_S: Final = 10.0
"""A kind of failure is logged at most this often."""


class FaultLedger:
    """The failures of a run."""

    def __init__(self, max_error_rate: float, *, num_judged: int = MIN_JUDGED) -> None:
        """The last `num_judged` rollouts are judged, but never fewer than `MIN_JUDGED`."""
        self.counts: Counter[FailureKind] = Counter()
        """Failures since `take_counts`."""
        self._max_error_rate = max_error_rate
        self._recent: deque[Failure | None] = deque(maxlen=max(num_judged, MIN_JUDGED))
        self._noticed_at: dict[FailureKind, float] = {}
        self._unnoticed: Counter[FailureKind] = Counter()

    def take_counts(self) -> Counter[FailureKind]:
        """The failures by kind since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def succeeded(self) -> None:
        self._recent.append(None)

    def failed(self, failure: Failure, *, now: float, is_judged: bool = True) -> str | None:
        """Count a failure. Returns a line for the log when it is time for one about this kind again.

        A failure that says nothing about the environment, such as that of a lost server, is not judged.
        """
        self.counts[failure.kind] += 1
        self._unnoticed[failure.kind] += 1
        if is_judged:
            self._recent.append(failure)
        if now - self._noticed_at.get(failure.kind, -NOTICE_INTERVAL_S) < NOTICE_INTERVAL_S:
            return None
        self._noticed_at[failure.kind] = now
        number = self._unnoticed.pop(failure.kind)
        return f"{number} {'rollout' if number == 1 else 'rollouts'} failed, the last with {failure}"

    def verdict(self) -> str | None:
        """Why the run must stop: more than the allowed share of the judged rollouts failed, or all of them."""
        failures = [failure for failure in self._recent if failure is not None]
        judged = len(self._recent)
        if judged < MIN_JUDGED:
            return None
        if len(failures) > self._max_error_rate * judged:
            excess = f"more than max_error_rate = {self._max_error_rate:g} allows"
        elif len(failures) == judged:
            excess = "which ends a run even with max_error_rate = 1"
        else:
            return None
        commonest, number = Counter(map(str, failures)).most_common(1)[0]
        return (
            f"{len(failures)} of the last {judged} rollouts failed, {excess}; "
            f"most often ({number} times) with {commonest}"
        )
