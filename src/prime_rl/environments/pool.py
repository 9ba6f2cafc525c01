"""The parent's side of environment workers: starts them, spreads rollouts over them, and survives their deaths.

    run(request) --> least-loaded live worker --> Rollout
                     dead worker               -> `worker_died` for everything it held, and a new worker
                     deadline passed           -> the worker ends the rollout (`timeout`); a worker whose event loop
                                                  is stuck in somebody's code cannot, and is killed
                     more to do, or less       -> more workers, or fewer (`sizing`)

Every request ends in exactly one Rollout, unless the caller cancels it. Nothing here looks at all rollouts when one of
them moves, unless its example is suspected of ending its workers (`suspects`). No torch and no verifiers in here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from prime_rl.config.shared import ClientConfig, EnvConfig, LogConfig
from prime_rl.environments.place import Place, PoolLimits
from prime_rl.environments.rollouts import EnvironmentSpec, Rollout, RolloutRequest, WorkerReady
from prime_rl.environments.sizing import Sizing, SizingRules
from prime_rl.environments.suspects import Suspects, example_of
from prime_rl.errors import EnvironmentSetupError
from prime_rl.logs import get_logger

__all__ = ["EnvPool", "PoolLimits", "PoolLoad", "environment_spec", "open_pools", "seeded"]

TEND_INTERVAL_S: Final = 1.0

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What a pool carries at the moment."""

    num_workers: int
    num_live: int
    """Those that are loaded."""
    in_flight: int
    waiting: int
    """Rollouts that wait for a worker."""
    num_restarts: int
    lag_s: float
    """By how much the event loop of the worst worker was late of late."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Rollouts that are to be scored together, and so must be in one worker."""

    key: int
    place: Place
    size: int
    num_members: int = 0
    """Those in flight, generated ones included."""
    generated: list[int] = field(default_factory=list)
    """Wire ids of those that wait for the others."""
    was_scored: bool = False
    """All that were to come did, and were given to be scored."""


class EnvPool:
    """The workers of one environment. Made by `open_pools`."""

    def __init__(self, spec: EnvironmentSpec, *, num_workers: int, log_dir: Path | None, limits: PoolLimits) -> None:
        """`num_workers`: most of them. What they write goes to a file each in `log_dir`; None: nowhere."""
        self.label = spec.label
        self._spec = spec
        self._log_dir = log_dir
        self._limits = limits
        self._most = num_workers
        rules = SizingRules(most=num_workers, rollouts_per_worker=limits.rollouts_per_worker, idle_s=limits.idle_s)
        self._sizing = Sizing(rules)
        self._ready: WorkerReady | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Of rollouts that wait for room."""
        self._suspended: deque[asyncio.Future[None]] = deque()
        """Of those whose examples are suspected, and that wait for a worker in which they are told from others."""
        self._groups: dict[int, _Group] = {}
        """Those that rollouts may join."""
        self._members: dict[int, _Group] = {}
        """By wire id, of those whose group is scored together. One that was begun anew is another group."""
        self._suspects = Suspects()
        self._avoided: frozenset[str] = frozenset()
        self._next_id = 0
        self._num_restarts_of_gone = 0
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places: dict[int, Place] = {}
        self._closing: set[asyncio.Task[None]] = set()
        """Of places that were let go."""
        self._grow(1)
        self._tender = asyncio.create_task(self._tend(), name=f"size of {spec.label}")

    @property
    def size(self) -> WorkerReady:
        """Sizes of the environment's splits."""
        assert self._ready is not None, "a pool is handed out once a worker is ready"
        return self._ready

    @property
    def num_restarts(self) -> int:
        """Workers that were replaced since the pool was opened."""
        return self._num_restarts_of_gone + sum(place.num_restarts for place in self._places.values())

    @property
    def load(self) -> PoolLoad:
        """What the pool carries at the moment."""
        places = self._places.values()
        return PoolLoad(
            num_workers=len(places),
            num_live=sum(place.is_live for place in places),
            in_flight=self._num_in_flight,
            waiting=sum(not waiter.done() for waiter in (*self._waiting, *self._suspended)),
            num_restarts=self.num_restarts,
            lag_s=max((place.lag_s for place in places), default=0.0),
        )

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run one rollout. Raises: EnvironmentSetupError when no worker can be brought up any more.

        Its deadline begins when a worker takes it.
        """
        if self._spec.rollout_timeout_s is not None:
            request = msgspec.structs.replace(request, timeout_s=self._spec.rollout_timeout_s)
        if (place := self._place_of_group(request)) is None:
            place = await self._place(request)
            if (meeting := self._place_of_group(request)) is not None:  # another of its group found room meanwhile
                place = meeting
                self._wake(1)
        is_suspect = self._suspects.is_suspect(request)
        self._next_id += 1
        wire_id = self._next_id
        if self.size.scores_groups and request.is_scored:
            self._join(wire_id, request, place)
        try:
            rollout = await place.run(request, wire_id=wire_id)
        finally:
            was_scored = self._leave(wire_id)
            self._wake(1)
            if is_suspect:
                _let_go_on(self._suspended, 1)
        assert rollout.env == self.label
        return msgspec.structs.replace(rollout, is_group_scored=True) if was_scored else rollout

    def avoid(self, servers: frozenset[str]) -> None:
        """Tell the workers, and those that come after them, that these servers are lost, and no others."""
        self._avoided = servers
        for place in self._places.values():
            place.avoid(servers)

    async def watch(self) -> None:
        """Returns never; raises EnvironmentSetupError when a worker is given up. For a supervisor."""
        await asyncio.gather(asyncio.shield(self._given_up), asyncio.shield(self._tender))

    async def wait_live(self) -> None:
        """Until a worker has loaded the environment. Raises: EnvironmentSetupError."""
        self._ready = await next(iter(self._places.values())).wait_ready()

    async def close(self) -> None:
        """End the workers. Rollouts that wait for one fail."""
        self._tender.cancel()
        closing = [place.close() for place in self._places.values()]
        try:
            await asyncio.gather(self._tender, *self._closing, *closing, return_exceptions=True)
        finally:
            self._give_up(EnvironmentSetupError(f"environment {self.label!r}: its workers were ended"))
            self._given_up.exception()  # told by `watch`, or by what failed with it

    @property
    def _num_in_flight(self) -> int:
        return sum(place.load for place in self._places.values())

    def _place_of_group(self, request: RolloutRequest) -> Place | None:
        """Where others of its group are, which it has to join however full that is."""
        group = self._groups.get(request.group) if request.group >= 0 else None
        return group.place if group is not None and group.place.is_live else None

    async def _place(self, request: RolloutRequest) -> Place:
        """A worker with room, in which it may be run beside what runs there."""
        queue = self._queue(request)
        place = None if queue else self._with_room(request)
        is_first = False  # of its queue: it was woken, and there was no room after all
        while place is None:
            if self._given_up.done():
                await asyncio.shield(self._given_up)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (queue.appendleft if is_first else queue.append)(waiter)
            self._resize()
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    _let_go_on(queue, 1)  # for the room that this one was woken for
                raise
            place = self._with_room(request)
            is_first = place is None and self._queue(request) is queue
            if not is_first:
                _let_go_on(queue, 1)  # the next: room for several may have come at once
                queue = self._queue(request)
        return place

    def _queue(self, request: RolloutRequest) -> deque[asyncio.Future[None]]:
        """In which it waits, if it has to."""
        return self._suspended if self._suspects.is_suspect(request) else self._waiting

    def _with_room(self, request: RolloutRequest) -> Place | None:
        """The live worker with the fewest rollouts; None while all have enough of them, and others come up.

        Of a suspected example: one in which it is told from others, and its rollouts together.
        """
        places = [place for place in self._places.values() if place.is_live and not place.is_retiring]
        if len(places) < self._most:
            places = [place for place in places if place.load < self._sizing.capacity]
        if self._suspects.is_suspect(request):
            places = [place for place in places if self._suspects.may_join(request, place.running())]
            example = example_of(request)
            together = [place for place in places if any(example_of(one) == example for one, _ in place.running())]
            places = together or places
        return min(places, key=lambda place: place.load, default=None)

    def _wake(self, number: int) -> None:
        """Let the first of those that wait look for room again."""
        _let_go_on(self._waiting, number)

    def _join(self, wire_id: int, request: RolloutRequest, place: Place) -> None:
        is_alone = request.group < 0
        key = -wire_id if is_alone else request.group
        group = self._groups.get(key)
        if group is None or group.place is not place:
            group = _Group(key=key, place=place, size=1 if is_alone else request.group_size)
            self._groups[key] = group
        group.num_members += 1
        self._members[wire_id] = group
        place.keep(group.generated)

    def _leave(self, wire_id: int) -> bool:
        """Returns whether its group was given to be scored."""
        group = self._members.pop(wire_id, None)
        if group is None:
            return False
        if wire_id in group.generated:
            group.generated.remove(wire_id)
        group.num_members -= 1
        if group.num_members == 0:
            self._shut(group)
        return group.was_scored

    def _shut(self, group: _Group) -> None:
        """None joins it any more. Another of its number may have been begun since."""
        if self._groups.get(group.key) is group:
            del self._groups[group.key]

    def _on_generated(self, place: Place, wire_id: int) -> None:
        """A rollout whose group is to be scored together is generated."""
        group = self._members[wire_id]
        group.generated.append(wire_id)
        # One that was cancelled or waited too long is still to leave.
        there = [member for member in group.generated if place.holds(member)]
        if len(there) == group.size:
            group.generated, group.was_scored = [], True
            self._shut(group)
            place.score(there)

    async def _tend(self) -> None:
        """Follow the load, and end workers that were let go and have nothing left to do."""
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            self._resize()
            for index, place in list(self._places.items()):
                if place.is_retiring and place.load == 0:
                    self._let_go(index)
            self._wake(self._sizing.capacity)
            _let_go_on(self._suspended, 1)

    def _let_go(self, index: int) -> None:
        place = self._places.pop(index)
        self._num_restarts_of_gone += place.num_restarts
        closing = asyncio.create_task(place.close(), name=f"end of a worker of {self.label}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _resize(self) -> None:
        working = [place for place in self._places.values() if not place.is_retiring]
        wanted = self._sizing.size(
            time.monotonic(),
            num_workers=len(working),
            num_rollouts=self._num_in_flight + len(self._waiting) + len(self._suspended),
            lag_s=max((place.lag_s for place in working), default=0.0),
        )
        if wanted > len(working):
            self._grow(wanted - len(working))
        elif wanted < len(working):
            min(working, key=lambda place: place.load).is_retiring = True

    def _grow(self, number: int) -> None:
        retiring = [place for place in self._places.values() if place.is_retiring][:number]
        for place in retiring:
            place.is_retiring = False
            self._wake(self._sizing.capacity)
        for _ in range(number - len(retiring)):
            index = next(index for index in range(len(self._places) + 1) if index not in self._places)
            spec = msgspec.structs.replace(self._spec, tells_examples=self._spec.tells_examples and self._ready is None)
            if spec.num_cpus is not None:
                spec = msgspec.structs.replace(spec, first_cpu=spec.first_cpu + index * spec.num_cpus)
            place = Place(
                spec, self._limits, self._log(index), self._suspects, is_first=self._ready is None,
                on_live=self._on_live, on_generated=self._on_generated, is_hopeless=self._is_hopeless,
            )  # fmt: skip
            place.avoid(self._avoided)
            place.served.add_done_callback(self._on_end)
            self._places[index] = place

    def _log(self, index: int) -> Path:
        if self._log_dir is None:
            return Path(os.devnull)
        return self._log_dir / f"{self.label.replace(os.sep, '_')}-{index}.log"

    def _on_live(self) -> None:
        self._wake(self._sizing.capacity if len(self._places) < self._most else len(self._waiting))
        _let_go_on(self._suspended, 1)

    def _is_hopeless(self) -> bool:
        return all(place.does_not_come_up for place in self._places.values())

    def _on_end(self, served: asyncio.Task[None]) -> None:
        """A worker is served no more: it is closed, or given up, and the environment with it."""
        error = None if served.cancelled() else served.exception()
        if error is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self._given_up.done():
            self._given_up.set_exception(error)
            self._wake(len(self._waiting))
            _let_go_on(self._suspended, len(self._suspended))


def _let_go_on(waiting: deque[asyncio.Future[None]], number: int) -> None:
    """Wake the first of these."""
    while number > 0 and waiting:
        waiter = waiting.popleft()
        if not waiter.done():
            waiter.set_result(None)
            number -= 1


@asynccontextmanager
async def open_pools(
    specs: Sequence[EnvironmentSpec], *, num_workers: int, log_dir: Path | None, limits: PoolLimits | None = None
) -> AsyncIterator[dict[str, EnvPool]]:
    """Start a worker for each environment, to become `num_workers` at most, and hand out the pools by label when all
    are ready; then end them.

    What workers write goes to a file each in `log_dir`; None: nowhere.
    Raises: EnvironmentSetupError with the reason when an environment cannot be loaded.
    """
    limits = limits or PoolLimits()
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
    pools: dict[str, EnvPool] = {}
    started = time.monotonic()
    first_cpu = 0
    try:
        for spec in specs:
            placed = msgspec.structs.replace(spec, first_cpu=first_cpu)
            first_cpu += num_workers * (spec.num_cpus or 0)
            pools[spec.label] = EnvPool(placed, num_workers=num_workers, log_dir=log_dir, limits=limits)
        for pool in pools.values():
            await pool.wait_live()
            _logger.info(
                "Environment %s: %d training and %d evaluation examples, a worker ready after %.1f s",
                pool.label, pool.size.num_train, pool.size.num_eval, time.monotonic() - started,
            )  # fmt: skip
        yield pools
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))


def seeded(specs: Sequence[EnvironmentSpec], seed: int) -> list[EnvironmentSpec]:
    """The same environments, of which nothing is left to chance."""
    return [msgspec.structs.replace(spec, seed=seed) for spec in specs]


def environment_spec(
    env: EnvConfig,
    *,
    client: ClientConfig,
    model: str,
    log: LogConfig,
    retry_s: float = 0.0,
    renderer: str = "auto",
    hash_keys: tuple[str, ...] = (),
    tells_examples: bool = False,
) -> EnvironmentSpec:
    """What workers of a configured environment need to know."""
    return EnvironmentSpec(
        id=env.id,
        label=env.label,
        args=env.args,
        api=env.api,
        agent=env.agent,
        renderer=renderer,
        base_urls=client.base_url,
        model=model,
        api_key_var=client.api_key_var,
        headers=client.headers,
        request_timeout_s=client.timeout,
        retry_s=retry_s,
        rollout_timeout_s=env.rollout_timeout,
        score_timeout_s=env.score_timeout,
        max_memory_gb=env.max_memory_gb,
        num_cpus=env.max_cpus,
        niceness=env.niceness,
        log_level=log.level,
        library_log_level=log.vf_level,
        hash_keys=hash_keys,
        tells_examples=tells_examples,
        logs_json=log.json_logging,
    )
