"""Which rollouts are to blame for the end of their worker. Pure: the time is passed in.

Nobody sees which of the rollouts in a worker ended it: by a crash, by holding too much memory, or by code that not even
a signal reaches. But one that does so does it again, whatever runs beside it, while others end well in between, or run
longer than they had. So the deaths of each example's workers are counted, in a row:

    alone in its worker                      to blame
    in more deaths in a row than the others  to blame, from the second on
    in as many as others                     nobody yet

What is not to blame is run again as if nothing had been; but of examples that were in two deaths a worker is given few
at a time, and of those that were in more a single one. So whatever ends its worker each time is without its like before
long, and blamed, and the others clear themselves.

Workers that end at almost the same time have something in common, of which the machine is one: suspected are then the
examples that were in all of them, and often that is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prime_rl.environments.rollouts import RolloutRequest, Split

Example = tuple[Split, int]
"""All its rollouts are one suspect."""

NUM_FEW: Final = 8
"""Examples in a worker at the same time of those that were in two deaths in a row."""
AT_ONCE_S: Final = 2.0
"""Deaths of several workers with no longer between them are one event."""
SPARE_S: Final = 5.0
"""What runs for twice as long as when its worker ended, and this much longer, is suspected no more."""


class Running(NamedTuple):
    """A rollout in a worker."""

    request: RolloutRequest
    seconds: float
    """Since it began."""


@dataclass(slots=True)
class _Suspect:
    deaths: int = 0
    """In a row."""
    seconds: float = 0.0
    """That it had run at the last of them."""


@dataclass(slots=True)
class _Event:
    """Deaths at almost the same time."""

    at: float
    workers: set[object]
    examples: set[Example] = field(default_factory=set)
    """Those in all of them."""


class Suspects:
    """The examples of one environment whose workers ended."""

    def __init__(self) -> None:
        self._suspects: dict[Example, _Suspect] = {}
        """Those in whose last worker nothing was heard of them before it ended."""
        self._event: _Event | None = None

    def is_suspect(self, request: RolloutRequest) -> bool:
        """Whether it may not be run beside just anything."""
        return self._deaths(example_of(request)) >= 2

    def may_join(self, request: RolloutRequest, others: Iterable[Running]) -> bool:
        """Whether it may be run in a worker beside these."""
        example = example_of(request)
        deaths = min(self._deaths(example), 3)
        if deaths < 2:
            return True
        alike = {
            other
            for one in others
            if self._deaths(other := example_of(one.request)) >= deaths and not self._outlived(other, one.seconds)
        }
        return len(alike - {example}) < (NUM_FEW if deaths == 2 else 1)

    def ended(self, request: RolloutRequest) -> None:
        """A rollout of this example ended, and its worker lives."""
        self._clear(example_of(request))

    def died_with(self, worker: object, running: Sequence[Running], now: float) -> list[bool]:
        """A worker ended in which these were running. Whether each of them is to blame.

        `worker`: by which it is told from others; one that is started in its stead is the same.
        """
        seconds: dict[Example, float] = {}
        for one in running:
            example = example_of(one.request)
            seconds[example] = max(one.seconds, seconds.get(example, 0.0))
        suspected = self._suspected(worker, seconds, now)
        most = max(map(self._deaths, suspected), default=0)
        worst = {example for example in suspected if self._deaths(example) == most}
        is_known = len(running) == 1 or (len(worst) == 1 and most >= 2)
        return [is_known and example_of(one.request) in worst for one in running]

    def _suspected(self, worker: object, seconds: Mapping[Example, float], now: float) -> set[Example]:
        """Count a death. Returns those of its examples that may be the cause."""
        event = self._event
        if event is not None and now - event.at <= AT_ONCE_S and worker not in event.workers:
            for example in event.examples - seconds.keys():
                self._suspects[example].deaths -= 1
            event.examples &= seconds.keys()
            event.workers.add(worker)
            event.at = now
            return event.examples
        for example, age in seconds.items():
            suspect = self._suspects.setdefault(example, _Suspect())
            suspect.deaths = 1 if self._outlived(example, age) else suspect.deaths + 1
            suspect.seconds = age
        self._event = _Event(at=now, workers={worker}, examples=set(seconds))
        return self._event.examples

    def _deaths(self, example: Example) -> int:
        suspect = self._suspects.get(example)
        return suspect.deaths if suspect is not None else 0

    def _outlived(self, example: Example, seconds: float) -> bool:
        """Whether it ran for so much longer than when its worker ended that it was not the cause."""
        return seconds > 2 * self._suspects[example].seconds + SPARE_S

    def _clear(self, example: Example) -> None:
        self._suspects.pop(example, None)
        if self._event is not None:
            self._event.examples.discard(example)


def example_of(request: RolloutRequest) -> Example:
    """The example that it is a rollout of, which is what is suspected."""
    return request.split, request.example
