"""What to generate next, and which groups make a batch. Pure: no clock, no I/O, no asyncio; events come in as calls.

    started --> dispatched --succeed (all places)--> judged by the caller --accept--> ready --take_batch--> shipped
       |            ^  |                                    |                           |
       |            |  +--fail: the place again, or too often: group given up          |
       |            |                                       +--filter: another example   |
       +------------+------------------- stale: its example is taken again first -------+

Words: a batch has the size P (groups; or tokens, where groups are sized in tokens), c is the next batch to ship, p the
version of the weights that are served, k = `max_async_level`, m = `max_off_policy_steps`, but 0 where k is 0 or the
level is strict. A group is active from its start until it is shipped or dropped, and its first version s is the p of
its first dispatch. Groups that are ready have a size; the others are taken to have the mean of those that had one.

    window   a group starts only while all active groups are smaller than P * (p + k - c + 1) and the spares together
             (in rounds: as many as have room then start at once, and only while all active groups are ready; nor does
             a batch ship before they are)
    ship     batch c takes the oldest ready groups of the size P together, as soon as there are and p >= c - k
    stale    when p moves, groups with p - s > m are dropped, and their examples are taken again first
    repair   a failed rollout is dispatched again within its group; when it has failed too often, the group is dropped.
             A group that its environment scores as one, and of which a rollout fails after that, starts anew
    replace  a group that was given up or filtered is replaced by one of the same environment (`on_replace`)

A group that starts anew holds nothing of before, and its s is that of its next dispatch.

Bound: every token of batch n was sampled by a version v with n - v <= k + m. Proof: v >= s, for a version served
never goes back. When batch n ships, p >= n - k (ship) and s >= p - m (stale), so n - v <= n - s <= k + m.

Every dispatched rollout ends once, and `on_end` is told how. No event costs more than O(log of the active groups), but
for one that ends whole groups, and new weights, which look at every group.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Generic

from prime_rl.errors import Hopeless
from prime_rl.orchestrator.groups import (
    Counters,
    Dispatch,
    End,
    Ended,
    Example,
    FinishedGroup,
    GroupState,
    Result,
    SchedulerState,
    Scored,
)
from prime_rl.orchestrator.limits import SchedulerLimits

HOPELESS_BATCHES: Final = 10
HOPELESS_GROUPS: Final = 300
"""When so many groups, and so many batches' worth of them, in a row have nothing to train on, the run ends."""


@dataclass(slots=True, kw_only=True)
class _Group(Generic[Result, Scored]):
    example: Example
    batch: int
    attempts: list[int]
    """Per place: how often it failed."""
    waiting: deque[int]
    """Places to dispatch, again or for the first time."""
    is_queued: bool = False
    first_version: int | None = None
    in_flight: dict[int, Dispatch] = field(default_factory=dict)
    """By rollout id."""
    results: dict[int, tuple[Dispatch, Result]] = field(default_factory=dict)
    """By place."""
    scored: Sequence[Scored] | None = None
    """By place, once it is ready."""
    filtered: Sequence[str] = ()
    """By place: what leaves the rollout out of training, "" for nothing."""
    size: float = 0


class Scheduler(Generic[Result, Scored]):
    """The state of generation. Results are opaque."""

    def __init__(
        self,
        limits: SchedulerLimits,
        on_end: Callable[[Ended[Result, Scored]], None] = lambda ended: None,
        on_replace: Callable[[Example], None] = lambda example: None,
    ) -> None:
        """`on_end` is told of every rollout that ended, `on_replace` the example of every group that came to nothing.

        Both are called amid the call that they tell of: they must only note it.
        """
        self.limits = limits
        self.version = 0
        self.next_batch = 0
        self.counters = Counters()
        self.num_held = 0
        """Rollouts that went well, and whose group is not shipped yet."""
        self._on_end = on_end
        self._on_replace = on_replace
        self._groups: dict[int, _Group[Result, Scored]] = {}
        """Active groups by number, in the order of their start."""
        self._group_of: dict[int, int] = {}
        """Rollout id in flight to group number."""
        self._again: deque[Example] = deque()
        self._queues: dict[str, list[int]] = {}
        """By environment: a heap of groups with places that wait, and of such as are gone."""
        self._ready: list[int] = []
        """A heap of groups that can ship, and of such as are gone."""
        self._ready_size = 0.0
        self._num_ready = 0
        self._estimate = limits.first_estimate
        self._num_sized = 0
        self._left_out: Counter[str] = Counter()
        """Rollouts of groups in a row that had nothing to train on, by reason."""
        self._num_left_out = 0
        """Such groups."""

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    @property
    def num_active_groups(self) -> int:
        return len(self._groups)

    @property
    def num_unjudged(self) -> int:
        """Active groups that are not ready."""
        return self.num_active_groups - self._num_ready

    @property
    def ready_size(self) -> float:
        """Size of the groups that can ship."""
        return self._ready_size

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
    def newest_allowed(self) -> int | None:
        """The newest weights that may be served now. None: any."""
        limits = self.limits
        is_free = self.is_done or not (limits.is_strict and limits.trains)
        return None if is_free else max(0, self.next_batch - limits.max_async_level)

    @property
    def window(self) -> int:
        """Size that the active groups may have together."""
        limits = self.limits
        batches = self._trained + limits.max_async_level - self.next_batch + 1
        if limits.max_batches is not None and limits.trains:
            batches = min(batches, limits.max_batches - self.next_batch)
        return limits.batch_target * batches + limits.spares if batches > 0 else 0

    @property
    def active_size(self) -> float:
        """Size of the active groups, as far as it is known, and else as it is to be expected."""
        return self._ready_size + (self.num_active_groups - self._num_ready) * self._estimate

    @property
    def _may_start(self) -> bool:
        return self.active_size < self.window and not (self.limits.in_rounds and self.num_unjudged)

    @property
    def _trained(self) -> int:
        """p of the rules."""
        return self.version if self.limits.trains else self.next_batch

    def has_work(self, blocked: Collection[str] = ()) -> bool:
        """Whether `next_dispatch` has a rollout, or may start a group whose first one it has once it is not blocked."""
        return self._oldest_waiting(blocked) is not None or self._may_start

    def next_dispatch(self, next_example: Callable[[], Example], *, blocked: Collection[str] = ()) -> Dispatch | None:
        """The next rollout to run, of the oldest group that lacks one; None while there is nothing to run.

        `next_example` is called when a new group is started on an example that was not dropped before. `blocked`:
        environments of which none may be run now; their groups are started in their turn and wait.
        """
        while (number := self._oldest_waiting(blocked)) is None:
            if not self._may_start:
                return None
            self._start(self._again.popleft() if self._again else next_example())
            while self.limits.in_rounds and self.active_size < self.window:
                self._start(self._again.popleft() if self._again else next_example())
        return self._dispatch(number)

    @property
    def left_out(self) -> str:
        """In words, what became of groups since there was one with something to train on; "" where nothing did."""
        if not self._num_left_out:
            return ""
        reasons = " and ".join(f"{number} as {why}" for why, number in self._left_out.most_common())
        groups = "1 group" if self._num_left_out == 1 else f"{self._num_left_out} groups in a row"
        return f"{groups} had nothing to train on: of the rollouts, {reasons} were left out"

    def is_in_flight(self, rollout_id: int) -> bool:
        """Whether the rollout has neither ended nor been cancelled."""
        return rollout_id in self._group_of

    def is_active(self, number: int) -> bool:
        """Whether the group was started, and neither shipped nor dropped."""
        return number in self._groups

    def succeed(self, rollout_id: int, result: Result) -> FinishedGroup[Result] | None:
        """A rollout ended well; one that was cancelled meanwhile is ignored.

        Returns its group where that is complete now: it is to be judged, and then accepted or filtered.
        """
        number = self._group_of.pop(rollout_id, None)
        if number is None:
            return None
        group = self._groups[number]
        dispatch = group.in_flight.pop(rollout_id)
        group.results[dispatch.place] = dispatch, result
        self.num_held += 1
        return self._finished(number) if len(group.results) == self.limits.rollouts_per_group else None

    def unjudged(self) -> list[FinishedGroup[Result]]:
        """The groups that are complete, and neither accepted nor filtered."""
        full = self.limits.rollouts_per_group
        return [
            self._finished(number)
            for number, group in self._groups.items()
            if len(group.results) == full and group.scored is None
        ]

    def accept(self, number: int, scored: Sequence[Scored], *, size: float = 1, filtered: Sequence[str] = ()) -> None:
        """A complete group is good to train on; one that was dropped meanwhile is ignored.

        `filtered`, by place: the filter that leaves the rollout out of training, "" for none. (): none of any. `size`
        counts what is trained on; a group of the size 0 fills no batch, so it is filtered, and another is needed.
        Raises: Hopeless when that happened too often in a row.
        """
        group = self._groups.get(number)
        if group is None:
            return
        assert group.scored is None, "a group is judged once"
        assert len(scored) == len(group.results) == self.limits.rollouts_per_group
        group.scored, group.size = scored, size
        group.filtered = filtered or [""] * len(scored)
        self._hold_ready(number, size)
        if size == 0:
            self._leave_out([number], End(kind="used"))
            return
        self._num_sized += 1
        self._estimate += (size - self._estimate) / self._num_sized
        if "" in group.filtered:
            self._left_out.clear()
            self._num_left_out = 0

    def filter(self, number: int, why: str) -> None:
        """A complete group is not trained on, so another is needed; one that was dropped meanwhile is ignored.

        Raises: Hopeless when that happened too often in a row.
        """
        if number in self._groups:
            self._leave_out([number], End(kind="filtered", why=why))

    def fail(self, rollout_id: int, result: Result, why: str, *, counts: bool = True, is_whole: bool = False) -> None:
        """A rollout failed: its place is dispatched again, or its group given up.

        `counts` is False for a failure that says nothing about the example, such as a server that was gone. `is_whole`:
        the group was scored as one and holds nothing without this rollout, so all its places are dispatched again.
        """
        number = self._group_of.pop(rollout_id, None)
        if number is None:
            return
        group = self._groups[number]
        dispatch = group.in_flight.pop(rollout_id)
        self._end(Ended(dispatch=dispatch, end=End(kind="failed", why=why), batch=group.batch, result=result))
        for place in range(self.limits.rollouts_per_group) if is_whole else [dispatch.place]:
            group.attempts[place] += counts
        if group.attempts[dispatch.place] >= self.limits.max_attempts:
            self.counters.groups_given_up += 1
            self._drop(number, End(kind="cancelled", why="given_up"))
            self._on_replace(group.example)
        elif is_whole:
            self._restart(number, "group_failed")
        else:
            self._queue(number, dispatch.place)

    def interrupt(self, why: str, scored_as_one: Collection[str] = ()) -> None:
        """Cancel every rollout in flight; they are dispatched again.

        `scored_as_one`: environments that score a group as one. Where some rollouts of a group are there and others in
        flight, which were lost on their way here, the group starts anew.
        """
        for number in dict.fromkeys(self._group_of.values()):
            group = self._groups[number]
            if group.results and group.example.env in scored_as_one:
                self._restart(number, why)
                continue
            for dispatch in self._end_in_flight(group, End(kind="cancelled", why=why)):
                self._queue(number, dispatch.place)

    def set_version(self, version: int) -> None:
        """Weights of `version` are served now. Drops what became stale."""
        newest = self.next_batch if self.newest_allowed is None else self.newest_allowed
        assert self.version <= version <= newest, f"weights {version} after {self.version}"
        self.version = version
        for number, group in list(self._groups.items()):
            if group.first_version is not None and version - group.first_version > self.limits.max_age:
                self.counters.groups_stale += 1
                self._again.append(group.example)
                self._drop(number, End(kind="cancelled", why="stale"))

    def take_batch(self) -> list[Sequence[Scored]] | None:
        """The groups of batch `next_batch`, which counts as shipped with this call; None while it cannot ship.

        Groups of which nothing would be trained on make no batch: they are filtered, and others are needed, so that
        there is room for new groups after this call also where it returns None.
        Raises: Hopeless when that happened too often in a row.
        """
        if self.is_done or self.waits_for_weights or (self.limits.in_rounds and self.num_unjudged):
            return None
        while self._ready_size >= self.limits.batch_target:
            numbers = self._oldest_ready()
            if any("" in self._groups[number].filtered for number in numbers):
                batch, self.next_batch = self.next_batch, self.next_batch + 1
                self.counters.groups_shipped += len(numbers)
                return [self._drop(number, End(kind="used"), batch).scored or () for number in numbers]
            self._leave_out(numbers, End(kind="used"))
        return None

    def close(self) -> None:
        """The run is over: what is active is cancelled."""
        for number in list(self._groups):
            self._drop(number, End(kind="cancelled", why="run_over"))

    def snapshot(self) -> SchedulerState[Result, Scored]:
        """All that `restore` needs to go on from here. It stays as it is whatever happens then."""
        return SchedulerState(
            version=self.version,
            next_batch=self.next_batch,
            counts={one.name: getattr(self.counters, one.name) for one in fields(self.counters) if one.name != "ends"},
            ends=list(self.counters.ends.items()),
            groups=[
                GroupState(
                    number=number,
                    example=group.example,
                    batch=group.batch,
                    attempts=list(group.attempts),
                    waiting=list(group.waiting),
                    first_version=group.first_version,
                    in_flight=list(group.in_flight.values()),
                    results=[group.results[place] for place in sorted(group.results)],
                    scored=group.scored,
                    filtered=list(group.filtered),
                    size=group.size,
                )
                for number, group in self._groups.items()
            ],
            again=list(self._again),
            estimate=self._estimate,
            num_sized=self._num_sized,
            left_out=dict(self._left_out),
            num_left_out=self._num_left_out,
        )

    def restore(self, state: SchedulerState[Result, Scored], *, version: int | None = None) -> None:
        """Go on from `state`; this scheduler has done nothing yet, and its limits may be others.

        What was in flight counts as being so until `interrupt`. `version`: the weights that are served, where those are
        older than the state's; then no version that samples a token of a group may be newer than its first one.
        """
        assert not self.counters.groups_started, "a scheduler is restored before it is used"
        self.version = state.version if version is None else min(version, state.version)
        self.next_batch = state.next_batch
        self.counters = Counters(ends=Counter(dict(state.ends)), **state.counts)
        self._again = deque(state.again)
        self._estimate, self._num_sized = state.estimate, state.num_sized
        self._left_out, self._num_left_out = Counter(state.left_out), state.num_left_out
        for one in state.groups:
            self._restore_group(one)

    def _restore_group(self, state: GroupState[Result, Scored]) -> None:
        number, results = state.number, {dispatch.place: (dispatch, result) for dispatch, result in state.results}
        first = state.first_version
        if first is not None and len(results) < self.limits.rollouts_per_group:
            first = min(first, self.version)
        self._groups[number] = _Group(
            example=state.example,
            batch=state.batch,
            attempts=list(state.attempts),
            waiting=deque(),
            first_version=first,
            in_flight={dispatch.rollout_id: dispatch for dispatch in state.in_flight},
            results=results,
            scored=state.scored,
            filtered=state.filtered,
            size=state.size,
        )
        self.num_held += len(results)
        for dispatch in state.in_flight:
            self._group_of[dispatch.rollout_id] = number
        for place in state.waiting:
            self._queue(number, place)
        if state.scored is not None:
            self._hold_ready(number, state.size)

    def _hold_ready(self, number: int, size: float) -> None:
        heapq.heappush(self._ready, number)
        self._ready_size += size
        self._num_ready += 1

    def _finished(self, number: int) -> FinishedGroup[Result]:
        group = self._groups[number]
        assert group.first_version is not None
        return FinishedGroup(
            number=number,
            example=group.example,
            first_version=group.first_version,
            batch=group.batch,
            results=[group.results[place][1] for place in range(self.limits.rollouts_per_group)],
        )

    def _oldest_ready(self) -> list[int]:
        """As many groups as make a batch, no longer in the heap of ready ones."""
        numbers: list[int] = []
        size = 0.0
        while size < self.limits.batch_target:
            number = heapq.heappop(self._ready)
            if number in self._groups:
                numbers.append(number)
                size += self._groups[number].size
        return numbers

    def _leave_out(self, numbers: Sequence[int], end: End) -> None:
        """Nothing of these complete groups is trained on. `end`: filtered, or used, where filters leave all out."""
        for number in numbers:
            group = self._drop(number, end, self.next_batch if end.kind == "used" else None)
            self._left_out.update(group.filtered or [end.why] * self.limits.rollouts_per_group)
            self._on_replace(group.example)
        self._num_left_out += len(numbers)
        self.counters.groups_filtered += len(numbers)
        batches = self._num_left_out * self._estimate / self.limits.batch_target
        if self._num_left_out >= HOPELESS_GROUPS and batches >= HOPELESS_BATCHES:
            raise Hopeless(
                f"{self.left_out}; look at their rewards, take other examples, or drop what leaves them out "
                "(buffer.online_difficulty_filtering, orchestrator.filters; for too_long raise seq_len or lower "
                "sampling.max_tokens)"
            )

    def _oldest_waiting(self, blocked: Collection[str]) -> int | None:
        oldest: int | None = None
        for env, queue in self._queues.items():
            while queue and not self._is_waiting(queue[0]):
                number = heapq.heappop(queue)
                if number in self._groups:
                    self._groups[number].is_queued = False
            if queue and env not in blocked and (oldest is None or queue[0] < oldest):
                oldest = queue[0]
        return oldest

    def _is_waiting(self, number: int) -> bool:
        return number in self._groups and bool(self._groups[number].waiting)

    def _queue(self, number: int, place: int) -> None:
        group = self._groups[number]
        group.waiting.append(place)
        if not group.is_queued:
            group.is_queued = True
            heapq.heappush(self._queues.setdefault(group.example.env, []), number)

    def _start(self, example: Example) -> None:
        number, size = self.counters.groups_started, self.limits.rollouts_per_group
        batch = self.next_batch + int(self.active_size // self.limits.batch_target)
        if self.limits.max_batches is not None:
            batch = min(batch, self.limits.max_batches - 1)
        self._groups[number] = _Group(example=example, batch=batch, attempts=[0] * size, waiting=deque())
        self.counters.groups_started += 1
        for place in range(size):
            self._queue(number, place)

    def _dispatch(self, number: int) -> Dispatch:
        group = self._groups[number]
        if group.first_version is None:
            group.first_version = self.version
        place = group.waiting.popleft()
        dispatch = Dispatch(
            rollout_id=self.counters.dispatched,
            group=number,
            place=place,
            example=group.example,
            version=self.version,
            batch=group.batch,
            attempt=group.attempts[place] + 1,
        )
        group.in_flight[dispatch.rollout_id] = dispatch
        self._group_of[dispatch.rollout_id] = number
        self.counters.dispatched += 1
        return dispatch

    def _drop(self, number: int, end: End, batch: int | None = None) -> _Group[Result, Scored]:
        """A group is active no longer, and its rollouts end so; in a batch those that a filter leaves out do not."""
        group = self._groups.pop(number)
        if group.scored is not None:
            self._num_ready -= 1
            self._ready_size = self._ready_size - group.size if self._num_ready else 0.0
        self._end_in_flight(group, end)
        self._end_held(group, end, group.batch if batch is None else batch)
        return group

    def _restart(self, number: int, why: str) -> None:
        """Dispatch all of a group again, as if it had just been started; its rollouts are cancelled."""
        group = self._groups[number]
        end = End(kind="cancelled", why=why)
        self._end_in_flight(group, end)
        self._end_held(group, end, group.batch)
        group.first_version = None
        group.waiting.clear()
        for place in range(self.limits.rollouts_per_group):
            self._queue(number, place)

    def _end_in_flight(self, group: _Group[Result, Scored], end: End) -> list[Dispatch]:
        dispatches = list(group.in_flight.values())
        group.in_flight.clear()
        for dispatch in dispatches:
            del self._group_of[dispatch.rollout_id]
            self._end(Ended(dispatch=dispatch, end=end, batch=group.batch))
        return dispatches

    def _end_held(self, group: _Group[Result, Scored], end: End, batch: int) -> None:
        self.num_held -= len(group.results)
        results, group.results = sorted(group.results.items(), key=lambda item: item[0]), {}
        for place, (dispatch, result) in results:
            why = group.filtered[place] if end.kind == "used" else ""
            scored = None if group.scored is None else group.scored[place]
            own = End(kind="filtered", why=why) if why else end
            self._end(Ended(dispatch=dispatch, end=own, batch=batch, result=result, scored=scored))

    def _end(self, ended: Ended[Result, Scored]) -> None:
        self.counters.ends[ended.end] += 1
        self._on_end(ended)
