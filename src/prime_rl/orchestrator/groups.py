"""What the scheduler is told of and tells: examples, dispatches, groups, and how rollouts end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar, get_args

Result = TypeVar("Result")
Scored = TypeVar("Scored")

EndKind = Literal["used", "filtered", "failed", "cancelled"]
ENDS: Final[tuple[EndKind, ...]] = get_args(EndKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example of one environment."""

    env: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One rollout to run now. `attempt` counts from 1."""

    rollout_id: int
    group: int
    place: int
    example: Example
    version: int
    batch: int
    """The batch that its group was started for."""
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rollout ended, and why.

    used; filtered: by what; failed: the kind of its failure; cancelled: stale (too old), given_up (another rollout of
    its group failed too often), group_failed (another one failed, and the group was scored as one), run_over, or what
    the caller of `interrupt` says.
    """

    kind: EndKind
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[Result, Scored]):
    """A rollout that ended."""

    dispatch: Dispatch
    end: End
    batch: int
    """The batch that it is in, or that its group was started for."""
    result: Result | None = None
    """None: it was cancelled while it ran."""
    scored: Scored | None = None
    """None: its group was not accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup(Generic[Result]):
    """G results of one example, in the order of their places."""

    number: int
    example: Example
    first_version: int
    batch: int
    """The batch that it was started for."""
    results: list[Result]


@dataclass(slots=True, kw_only=True)
class RolloutCounts:
    """How rollouts ended so far: dispatched = used + filtered + failed + cancelled + in flight + held, at any time.

    Held: it went well, and its group is not shipped yet.
    """

    dispatched: int = 0
    ends: Counter[End] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.number("failed")

    @property
    def cancelled(self) -> int:
        return self.number("cancelled")

    def number(self, kind: EndKind) -> int:
        """Rollouts that ended so, whyever."""
        return sum(number for end, number in self.ends.items() if end.kind == kind)

    def __str__(self) -> str:
        ends = sorted(self.ends.items(), key=lambda item: -item[1])
        return f"{self.dispatched} rollouts: " + (", ".join(f"{number} {end}" for end, number in ends) or "none ended")


@dataclass(slots=True, kw_only=True)
class Counters(RolloutCounts):
    """How rollouts and groups of training ended so far."""

    groups_started: int = 0
    groups_shipped: int = 0
    groups_stale: int = 0
    groups_given_up: int = 0
    groups_filtered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState(Generic[Result, Scored]):
    """What a scheduler must know of an active group to go on with it."""

    number: int
    example: Example
    batch: int
    attempts: list[int]
    """By place."""
    waiting: list[int]
    """Places."""
    first_version: int | None
    in_flight: list[Dispatch]
    results: list[tuple[Dispatch, Result]]
    """In the order of their places."""
    scored: Sequence[Scored] | None
    """By place, once it is ready."""
    filtered: list[str]
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState(Generic[Result, Scored]):
    """What a scheduler knows. Results and scores are those that it holds, not copies."""

    version: int
    next_batch: int
    counts: dict[str, int]
    """The fields of `Counters` that are numbers."""
    ends: list[tuple[End, int]]
    groups: list[GroupState[Result, Scored]]
    """In the order of their start."""
    again: list[Example]
    estimate: float
    num_sized: int
    left_out: dict[str, int]
    num_left_out: int
