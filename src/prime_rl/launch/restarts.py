"""Whether, and when, a process that died is started again. Pure: times and places are passed in.

A restart waits 1, 2, 4 ... 60 seconds, and 1 again once the process has lived for a while. Two things end it: more than
`limit` restarts of one process; and a poison step, at which a process died three times without having got further than
ever before in between. Deaths at several steps that were made before, as a machine's bad hour gives, are none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from prime_rl.journal import Entry

LONGEST_WAIT_S: Final = 60.0
LIVED_S: Final = 30.0
"""A process that lived so long did not die of being started again too soon."""
POISON: Final = 3
"""Deaths in one place that end the run."""

PROGRESS: Final = frozenset(
    {
        *("batch_begun", "batch_complete", "evaluation_begun", "evaluation_complete"),
        *("batch_received", "batch_consumed", "weights_begun", "weights_published"),
    }
)
"""Events that tell how far a process came. Checkpoints do not: after a restart they may fall on other steps."""
LOOPS: Final = ("orchestrator", "trainer")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a run, or one process of it, has come."""

    length: int
    """How many different things happened; what is done again after a restart does not count again."""
    name: str
    """Where it was when it died, in words: after a restart perhaps at what had happened before."""


def place_of(entries: Iterable[Entry], process: str) -> Place:
    """How far `process` came since the launcher was started; of a server, which has no steps, how far the run did."""
    own = (process,) if process in LOOPS else LOOPS
    happened: set[tuple[str, str, int | None]] = set()
    last: tuple[str, str, int | None] | None = None
    for entry in entries:
        if entry.event == "run_started":
            happened, last = set(), None
        elif entry.event == "process_started" and entry.facts.get("name") == process in LOOPS:
            last = None
        elif entry.process in own and entry.event in PROGRESS:
            found = (entry.process, entry.event, entry.step)
            if process in LOOPS or found not in happened:
                last = found
            happened.add(found)
    if last is None:
        return Place(len(happened), "before its first step" if process in LOOPS else "before the first step")
    who, event, step = last
    said = event.replace("_", " ")
    return Place(len(happened), f"after {said} {step}" if process in LOOPS else f"after {who}'s {said} {step}")


@dataclass(frozen=True, slots=True)
class Again:
    """It is started again."""

    wait_s: float
    number: int
    """The first restart of a process is 1."""


@dataclass(frozen=True, slots=True)
class NoMore:
    """It is not, and why."""

    reason: str


@dataclass(slots=True)
class _Record:
    num_restarts: int = 0
    num_quick: int = 0
    """Deaths in a row soon after the start."""
    length: int = -1
    """Of the place of the last death."""
    num_at: dict[str, int] = field(default_factory=dict)
    """Deaths by the name of their place, since the process got further."""


@dataclass(slots=True)
class Restarts:
    """The deaths of the processes of a run."""

    limit: int
    """Most restarts of one process."""
    _records: dict[str, _Record] = field(default_factory=dict)

    def after_death(self, name: str, *, lived_s: float, place: Place) -> Again | NoMore:
        """What to do about a process that died after `lived_s` seconds, when it had come to `place`."""
        record = self._records.setdefault(name, _Record())
        if place.length != record.length:
            record.length, record.num_at = place.length, {}
        record.num_at[place.name] = num_here = record.num_at.get(place.name, 0) + 1
        if num_here >= POISON:
            return NoMore(f"it died {num_here} times in the same place, {place.name}: no restart gets it further")
        if record.num_restarts >= self.limit:
            return NoMore(f"it was started again {self.limit} times already (max_restarts)")
        record.num_quick = record.num_quick + 1 if lived_s < LIVED_S else 1
        record.num_restarts += 1
        return Again(min(2.0 ** (record.num_quick - 1), LONGEST_WAIT_S), record.num_restarts)
