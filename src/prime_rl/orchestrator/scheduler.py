"""What to generate next, and which groups make a batch. Pure: no clock, no I/O, no asyncio; events come in as calls.

Words: P groups make a batch, G rollouts make a group, c is the next batch to ship, p the version of the weights that
are served, k = `max_async_level`, m = `max_off_policy_steps`. A group is active from its start until it is shipped or
dropped, and its first version s is the p of its first dispatch.

    window   a group starts only while fewer than P * (p + k - c + 1) groups are active
    ship     batch c takes the P oldest finished groups, as soon as there are P and p >= c - k
    stale    when p moves, groups with p - s > m are dropped, and their examples are taken again first
    repair   a failed rollout is dispatched again within its group; when it has failed too often, the group is dropped

Bound: every token of batch n was sampled by a version v with n - v <= k + m. Proof: v >= s, for a version served
never goes back. When batch n ships, p >= n - k (ship) and s >= p - m (stale), so n - v <= n - s <= k + m. With k = 0 it
is 0: groups of batch n start only once p = n (window), and p stays n until batch n is shipped, because weights n + 1
are made from it; so s = p = n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Result = TypeVar("Result")


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
    example: Example
    version: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup(Generic[Result]):
    """G results of one example, in the order of their places."""

    example: Example
    first_version: int
    results: list[Result]


@dataclass(slots=True, kw_only=True)
class Counters:
    """How everything ended so far. dispatched = succeeded + failed + cancelled + in flight, at any time."""

    dispatched: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    groups_started: int = 0
    groups_shipped: int = 0
    groups_stale: int = 0
    groups_given_up: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """P, G, k, m and what else bounds the schedule."""

    groups_per_batch: int
    rollouts_per_group: int
    max_async_level: int
    max_off_policy_steps: int
    max_attempts: int = 3
    max_batches: int | None = None
    max_in_flight: int | None = None
    trains: bool = True
    """False: generation is measured alone. The weights stay as they are, and the rules take p = c, as if training took
    no time; groups of batches after the last are started too, so that it is not measured while the others run dry."""


@dataclass(slots=True, kw_only=True)
class _Group(Generic[Result]):
    example: Example
    attempts: list[int]
    """Per place: how often it failed."""
    first_version: int | None = None
    results: dict[int, Result] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    """Places to dispatch, again or for the first time."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Rollout id to place."""


class Scheduler(Generic[Result]):
    """The state of generation. Results are opaque."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.version = 0
        self.next_batch = 0
        self.counters = Counters()
        self._groups: dict[int, _Group[Result]] = {}
        """Active groups by number, in the order of their start."""
        self._group_of: dict[int, int] = {}
        """Rollout id in flight to group number."""
        self._again: deque[Example] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    @property
    def num_active_groups(self) -> int:
        return len(self._groups)

    @property
    def async_level(self) -> int:
        """c - p: how far the next batch is ahead of the weights that are served."""
        return self.next_batch - self.version

    @property
    def is_done(self) -> bool:
        """Every batch was shipped."""
        return self.next_batch == self.limits.max_batches

    @property
    def waits_for_weights(self) -> bool:
        """The next batch may not ship before newer weights are served."""
        return not self.is_done and self._trained < self.next_batch - self.limits.max_async_level

    @property
    def window(self) -> int:
        """Groups that may be active."""
        limits = self.limits
        batches = self._trained + limits.max_async_level - self.next_batch + 1
        if limits.max_batches is not None and limits.trains:
            batches = min(batches, limits.max_batches - self.next_batch)
        return limits.groups_per_batch * max(batches, 0)

    @property
    def _trained(self) -> int:
        """p of the rules."""
        return self.version if self.limits.trains else self.next_batch

    def next_dispatch(self, next_example: Callable[[], Example]) -> Dispatch | None:
        """The next rollout to run, of the oldest group that lacks one; None while there is nothing to run.

        `next_example` is called when a new group is started on an example that was not dropped before.
        """
        limits = self.limits
        if limits.max_in_flight is not None and self.num_in_flight >= limits.max_in_flight:
            return None
        number = next((number for number, group in self._groups.items() if group.waiting), None)
        if number is None:
            if self.num_active_groups >= self.window:
                return None
            number = self._start(self._again.popleft() if self._again else next_example())
        return self._dispatch(number)

    def is_in_flight(self, rollout_id: int) -> bool:
        """Whether the rollout has neither ended nor been cancelled."""
        return rollout_id in self._group_of

    def succeed(self, rollout_id: int, result: Result) -> None:
        """A rollout ended well. One that was cancelled meanwhile is ignored."""
        entry = self._end(rollout_id)
        if entry is not None:
            group, place = entry
            group.results[place] = result
            self.counters.succeeded += 1

    def fail(self, rollout_id: int, *, counts: bool = True) -> list[int]:
        """A rollout failed; its place is dispatched again, or its group is dropped. Returns rollouts to cancel.

        `counts` is False for a failure that says nothing about the example, such as a server that was gone.
        """
        number = self._group_of.get(rollout_id)
        entry = self._end(rollout_id)
        if entry is None or number is None:
            return []
        group, place = entry
        self.counters.failed += 1
        group.attempts[place] += counts
        if group.attempts[place] < self.limits.max_attempts:
            group.waiting.append(place)
            return []
        self.counters.groups_given_up += 1
        return self._drop(number)

    def set_version(self, version: int) -> list[int]:
        """Weights of `version` are served now. Drops what became stale. Returns rollouts to cancel."""
        assert self.version <= version <= self.next_batch, f"weights {version} after {self.version}"
        self.version = version
        stale = [
            number
            for number, group in self._groups.items()
            if group.first_version is not None and version - group.first_version > self.limits.max_off_policy_steps
        ]
        cancelled: list[int] = []
        for number in stale:
            self.counters.groups_stale += 1
            self._again.append(self._groups[number].example)
            cancelled += self._drop(number)
        return cancelled

    def take_batch(self) -> list[FinishedGroup[Result]] | None:
        """The groups of batch `next_batch`, which counts as shipped with this call; None while it cannot ship."""
        if self.is_done or self.waits_for_weights:
            return None
        limits = self.limits
        finished = [n for n, group in self._groups.items() if len(group.results) == limits.rollouts_per_group]
        if len(finished) < limits.groups_per_batch:
            return None
        groups = [self._groups.pop(number) for number in finished[: limits.groups_per_batch]]
        self.next_batch += 1
        self.counters.groups_shipped += len(groups)
        return [self._finished(group) for group in groups]

    def _finished(self, group: _Group[Result]) -> FinishedGroup[Result]:
        assert group.first_version is not None
        results = [group.results[place] for place in range(self.limits.rollouts_per_group)]
        return FinishedGroup(example=group.example, first_version=group.first_version, results=results)

    def _start(self, example: Example) -> int:
        number = self.counters.groups_started
        size = self.limits.rollouts_per_group
        self._groups[number] = _Group(example=example, attempts=[0] * size, waiting=deque(range(size)))
        self.counters.groups_started += 1
        return number

    def _dispatch(self, number: int) -> Dispatch:
        group = self._groups[number]
        if group.first_version is None:
            group.first_version = self.version
        rollout_id = self.counters.dispatched
        place = group.waiting.popleft()
        group.in_flight[rollout_id] = place
        self._group_of[rollout_id] = number
        self.counters.dispatched += 1
        return Dispatch(
            rollout_id=rollout_id,
            group=number,
            example=group.example,
            version=self.version,
            attempt=group.attempts[place] + 1,
        )

    def _end(self, rollout_id: int) -> tuple[_Group[Result], int] | None:
        number = self._group_of.pop(rollout_id, None)
        if number is None:
            return None
        group = self._groups[number]
        return group, group.in_flight.pop(rollout_id)

    def _drop(self, number: int) -> list[int]:
        cancelled = list(self._groups.pop(number).in_flight)
        for rollout_id in cancelled:
            del self._group_of[rollout_id]
        self.counters.cancelled += len(cancelled)
        return cancelled
