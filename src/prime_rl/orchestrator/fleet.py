"""The inference servers of a run: which are up, what they serve, which rollout goes where.

                 answers             serves the target
    DOWN --------------> JOINING ------------------> UP --> rollouts are assigned, newest weights are loaded
      ^                     |                         |
      +---------------------+-------------------------+
        no answer (refused, or silent twice), another instance, other weights than it was given, a failed load,
        paused without a reason

    loop               consumes     waits for                    unblocked by
    watch (a server)   its health   the next probe               time; the probe's own deadline
    load (a server)    the target   the server's answer          the server; `lose`, when it stops answering
    outage             -            a server that is up          a server that joins; else the run's end, in time

A server that comes back - told by the `instance` of its health, however short it was gone - is given the target before
it is assigned anything. A server is lost alone; only when none has been up for `outage_timeout` the run ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from prime_rl import activity
from prime_rl.aio import together
from prime_rl.environments.client import Unreachable, Unwell, of_server
from prime_rl.errors import ArtifactError, InferenceError, PrimeRLError
from prime_rl.logs import get_logger
from prime_rl.orchestrator.assignment import Assignment
from prime_rl.transport.api import HealthResponse, InitTransferRequest, ServedWeights

PROBE_INTERVAL_S: Final = 1.0
RETURN_POLL_S: Final = 0.1
"""Seconds between two probes of a server that is gone: how long it waits for work when it is back."""
PAUSED_PROBES: Final = 2
"""Probes in a row that find a server paused when nobody updates it, after which it is made to join again."""
SILENT_PROBES: Final = 2
"""Probes in a row without an answer in time, after which a server counts as hung."""
STRAGGLER_S: Final = 2.0
"""Seconds that the first server with new weights waits for the others; longer where its own load took longer."""
RETRY_S: Final = 1.0
"""Seconds until a server that refused its weights is given them again."""

_logger = get_logger(__name__)


class Client(Protocol):
    """What a fleet needs of `environments.client.InferenceClient`."""

    base_url: str

    async def probe(self) -> HealthResponse | Unwell: ...
    async def wait_ready(self, timeout: float) -> HealthResponse: ...
    def complaint(self, state: Unwell, timeout: float) -> str: ...
    async def check_model(self, name: str) -> None: ...
    async def update_weights(self, directory: Path, version: int) -> ServedWeights: ...
    async def reload_weights(self) -> ServedWeights: ...
    async def metrics(self) -> str: ...
    async def init_transfer(self, request: InitTransferRequest) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What every server shall serve.

    Example: Target(version=3, directory=Path("weights/step_3"), digest="9f...")
    """

    version: int = 0
    directory: Path | None = None
    """None: the model that the server was started with."""
    digest: str | None = None
    """None: whatever the server finds there; of the base, that it was never updated."""
    only_for: frozenset[str] | None = None
    """Instances that can take it, where it is sent to them and not read. None: any."""


class State(StrEnum):
    """Where a server stands; see the module's drawing."""

    DOWN = "down"
    JOINING = "joining"
    UP = "up"


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server. Times are those of the event loop."""

    client: Client
    state: State = State.DOWN
    instance: str | None = None
    joined: str | None = None
    """The instance that was brought up to date last."""
    served: ServedWeights | None = None
    """As it said last."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a load."""
    work: asyncio.Task[None] | None = None
    """The load that is under way."""
    num_loads: int = 0
    num_silent: int = 0
    num_paused: int = 0
    is_held: bool = False
    """Whether it is paused, or being paused, on purpose."""
    trouble: str = ""
    """Why it is down."""
    refusal: PrimeRLError | None = None
    """What it answered to its last load, where that failed and it was there."""
    retry_at: float = -math.inf
    update_s: float = 0.0
    """Seconds that its last load took."""

    @property
    def name(self) -> str:
        return self.client.base_url


def _now() -> float:
    return asyncio.get_running_loop().time()


def _acting() -> float:
    """The same without what this process was stopped."""
    return _now() - activity.lost_s()


def _ignore_loss(server: Server, reason: str) -> None:
    return None


def _ignore() -> None:
    return None


def _serves(server: Server, version: int) -> bool:
    return server.state is State.UP and server.served is not None and server.served.version >= version


class Fleet:
    """The servers and their state. `start`, then `watch` beside everything else."""

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        model: str,
        outage_timeout_s: float,
        addresses: Sequence[str] | None = None,
        on_event: Callable[[str], None] = lambda event: None,
    ) -> None:
        """`addresses`: where rollouts are sent, if not to the servers themselves: a router that stands before them."""
        self.servers = [Server(client=client) for client in clients]
        self.target = Target()
        self.num_restarts = 0
        self.on_change: Callable[[], None] = _ignore
        """Called when a server comes, goes or has new weights."""
        self.on_lost: Callable[[Server, str], None] = _ignore_loss
        """Called with a server that was up, and why it no longer is."""
        self._model = model
        self._outage_timeout_s = outage_timeout_s
        self._on_event = on_event
        self._routers = None if addresses is None or list(addresses) == [s.name for s in self.servers] else addresses
        self._assignment = Assignment(addresses or [server.name for server in self.servers])
        self._changed = asyncio.Event()
        self._disturbed_at = -math.inf
        """When a server was lost, or came back, last."""
        self._outage_since: float | None = None
        self._outage = activity.waiting("inference", "a server that is up", deadline_s=outage_timeout_s)
        self._ready_timeout = 0.0
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._may_reload = True

    @property
    def num_up(self) -> int:
        return sum(server.state is State.UP for server in self.servers)

    @property
    def down(self) -> frozenset[str]:
        """Addresses to which no request should be sent.

        While there is nowhere else, a server that only hangs keeps what it has; one that was started again has nothing,
        and gets nothing before its weights.
        """
        if self._routers is not None:
            return frozenset()
        is_any_up = self.num_up > 0
        return frozenset(
            server.name
            for server in self.servers
            if server.state is not State.UP and (is_any_up or server.joined != server.instance)
        )

    def may_assign(self, version: int) -> bool:
        """Whether a server that is up serves these weights or newer ones."""
        return any(_serves(server, version) for server in self.servers)

    def assign(self, rollout: Hashable, group: Hashable, version: int) -> tuple[str, ...]:
        """The addresses for a rollout, the one to begin with first; it counts as its load until `release`.

        `version`: the oldest weights that may sample it.
        """
        able = self._routers
        if able is None:
            able = [server.name for server in self.servers if _serves(server, version)]
        return self._assignment.assign(rollout, group, able)

    def release(self, rollout: Hashable) -> None:
        """The rollout has ended."""
        self._assignment.release(rollout)

    async def start(
        self, target: Target | None, ready_timeout: float, *, may_reload: bool = True, wait_for_all: bool = False
    ) -> None:
        """Until a server serves `target` (None: whatever it serves); the others join when they can.

        `may_reload`: servers that serve the weights of another run are given `target`; else they are refused.
        Raises: the InferenceError of the first server when all of them fail.
        """
        if target is not None:
            self.target = target
        self._may_reload = may_reload
        self._ready_timeout = ready_timeout
        joins = [asyncio.create_task(self._first_join(server, target, ready_timeout)) for server in self.servers]
        try:
            await (asyncio.wait(joins) if wait_for_all else self._first_and_its_like(joins))
            errors = [task.exception() for task in joins if task.done()]
            if error := next((error for error in errors if error is not None), None):
                if self.num_up == 0:
                    raise error
                _logger.warning("%s", error)
        finally:
            for task in joins:
                task.cancel()
            await asyncio.gather(*joins, return_exceptions=True)
        for server in self.servers:
            if server.state is not State.UP:
                server.state = State.DOWN
                self._tell(f"inference server {server.name} is not there yet; it is used when it comes")

    async def watch(self) -> None:
        """Watch every server. Returns never; raises InferenceError when none was up for too long."""
        try:
            await together(*map(self._watch, self.servers), self._watch_outage())
        finally:
            for server in self.servers:
                if server.work is not None:
                    server.work.cancel()

    async def update(self, target: Target) -> None:
        """Have the servers serve `target`; returns once one does, and those that need about as long do, too.

        Raises: what the servers answered when every one of them refuses; InferenceError when none is up for too long.
        """
        self.target = target
        asked = [server for server in self.servers if server.state is State.UP]
        for server in self.servers:
            server.refusal = None
        for server in asked:
            if server.work is None or server.work.done():
                server.work = asyncio.create_task(self._load_up(server))
        await self._first_and_its_like([server.work for server in asked if server.work is not None])
        refusals = [server.refusal for server in self.servers if server.refusal is not None]
        if len(refusals) == len(self.servers) and self.num_up == 0:
            raise refusals[0]
        await self._until(self._is_anybody_current)

    async def was_disturbed(self, since: float) -> bool:
        """Whether a server was lost or came back after `since`. Looks at all of them, and waits while none is up.

        All rollouts of a lost server fail together and ask the same; one look answers all who asked before it.
        """
        asked_at = _now()
        async with self._looking:
            if asked_at >= self._looked_at and since >= self._disturbed_at:
                looked_at = _now()
                await together(*(self._look(server) for server in self.servers if server.state is State.UP))
                self._looked_at = looked_at
        await self._until(lambda: self.num_up > 0)
        return since < self._disturbed_at

    def _is_anybody_current(self) -> bool:
        return any(map(self._is_current, self.servers))

    def _is_current(self, server: Server) -> bool:
        return server.state is State.UP and self._serves_target(server)

    def _serves_target(self, server: Server) -> bool:
        served, target = server.served, self.target
        if served is None or served.version != target.version:
            return False
        return served.digest == target.digest or (target.digest is None and target.directory is not None)

    # Consumes: the server's health. Waits for: the next probe. Unblocked by: time, and the probe's deadline.
    async def _watch(self, server: Server) -> None:
        while True:
            await self._look(server)
            if server.work is not None and server.work.done() and not server.work.cancelled():
                server.work.result()  # its own errors were taken care of; another one is the run's
            await asyncio.sleep(RETURN_POLL_S if server.state is State.DOWN else PROBE_INTERVAL_S)

    async def _look(self, server: Server) -> None:
        num_loads = server.num_loads
        health = await server.client.probe()
        if isinstance(health, Unwell):
            server.num_silent = server.num_silent + 1 if health.is_silent else 0
            if not health.is_silent or server.num_silent >= SILENT_PROBES:
                self.lose(server, health.reason)
            return
        server.num_silent = 0
        if server.instance not in (None, health.instance):
            self.num_restarts += 1
            self.lose(server, "it was started again")
        server.instance = health.instance
        is_idle = num_loads == server.num_loads and not server.lock.locked()  # else it may be of before a load
        server.num_paused = server.num_paused + 1 if health.paused and is_idle and not server.is_held else 0
        if server.num_paused >= PAUSED_PROBES:
            server.num_paused = 0
            self.lose(server, "it is paused, and nobody updates it")
        if is_idle:
            served = ServedWeights(version=health.version, digest=health.digest)
            if server.state is State.UP and served != server.served:
                self.lose(server, f"it serves weights {served.version} that it was not given")
            server.served = served
        if server.state is not State.DOWN or _now() < server.retry_at:
            return
        server.state = State.JOINING
        server.work = asyncio.create_task(self._join(server))
        self._note_change()

    def lose(self, server: Server, reason: str) -> None:
        """Nothing more is given to it, and what is being given to it is given up."""
        if server.work is not None:
            server.work.cancel()
            server.work = None
        was, server.state = server.state, State.DOWN
        server.retry_at = -math.inf
        if was is State.DOWN:
            return
        if was is State.UP:
            self._disturbed_at = _now()
            self._tell(f"inference server {server.name} is lost: {reason}; {self.num_up} of {len(self.servers)} are up")
            self.on_lost(server, reason)
        server.trouble = reason
        if self._outage_since is None and self.num_up == 0:
            self._outage_since = _acting()
            self._outage = activity.waiting("inference", "a server that is up", deadline_s=self._outage_timeout_s)
            self._outage.begin()
        self._note_change()

    async def _join(self, server: Server) -> None:
        """Bring a server that answers up to date; then it is up."""
        started = _now()
        try:
            await server.client.check_model(self._model)
            await server.client.resume()  # whoever paused it may be gone
            await self._load(server)
        except (InferenceError, ArtifactError) as error:
            server.state = State.DOWN
            server.retry_at = _now() + RETRY_S
            if server.trouble != str(error):
                server.trouble = str(error)
                self._tell(f"inference server {server.name} cannot join: {error}")
            return
        self._come_up(server)
        waited = _now() - started
        self._tell(
            f"inference server {server.name} is up with weights {self.target.version} after {waited:.1f} s; "
            f"{self.num_up} of {len(self.servers)} are up"
        )

    async def _first_join(self, server: Server, target: Target | None, ready_timeout: float) -> None:
        """At the start; raises what is wrong."""
        health = await server.client.wait_ready(ready_timeout)
        server.instance, server.state = health.instance, State.JOINING
        server.served = ServedWeights(version=health.version, digest=health.digest)
        await server.client.check_model(self._model)
        if target is None:
            if self.num_up == 0:
                self.target = Target(version=health.version, directory=Path(), digest=health.digest)
            if not self._serves_target(server):
                raise InferenceError(f"{server.name} serves other weights than the others; restart it")
        else:
            is_used = health.version != 0 or health.digest is not None
            if is_used and not self._serves_target(server) and not self._may_reload:
                raise InferenceError(
                    f"the server at {server.name} serves weights {health.version} of another run; restart it, or let "
                    "this run reload them (reload_weights_on_start)"
                )
            await server.client.resume()
            await self._load(server)
        self._come_up(server)

    def _come_up(self, server: Server) -> None:
        server.state, server.trouble, server.refusal = State.UP, "", None
        server.joined = server.instance
        self._disturbed_at = _now()
        self._outage_since = None
        self._outage.end()
        self._note_change()

    async def _load_up(self, server: Server) -> None:
        """Give a server that is up the target; where that fails, it is lost."""
        try:
            await self._load(server)
        except (InferenceError, ArtifactError) as error:
            server.work = None  # this one, which must not cancel itself
            self.lose(server, str(error))
            if not isinstance(error, Unreachable):
                server.refusal = error
                server.retry_at = _now() + RETRY_S
        self._note_change()

    async def _load(self, server: Server) -> None:
        """Until it serves the target, which may move meanwhile."""
        async with server.lock:
            while not self._serves_target(server):
                target, started = self.target, _now()
                if target.only_for is not None and server.instance not in target.only_for:
                    raise InferenceError(
                        f"weights {target.version} were sent when it was not there, and are in no file yet; the "
                        "trainer writes them as soon as it waits"
                    )
                server.num_loads += 1
                try:
                    if target.directory is None:
                        server.served = await server.client.reload_weights()
                    else:
                        server.served = await server.client.update_weights(target.directory, target.version)
                finally:
                    server.num_loads += 1
                server.update_s = _now() - started

    async def _first_and_its_like(self, loads: Sequence[asyncio.Task[None]]) -> None:
        """Until all have ended; those that need much longer than the first to succeed are not waited for."""
        started = _now()
        pending = set(loads)
        while pending and not self._is_anybody_current():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            took = _now() - started
            await asyncio.wait(pending, timeout=max(STRAGGLER_S, took))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # Consumes: nothing. Waits for: a server that is up. Unblocked by: one that joins; else the run ends.
    async def _watch_outage(self) -> None:
        patience_s = activity.patience_s(self._outage_timeout_s, "inference")
        if activity.is_supervised("inference"):  # it is started again, and then needs as long as it did at the start
            patience_s = max(patience_s, self._ready_timeout)
        while True:
            await asyncio.sleep(RETURN_POLL_S)
            if self._outage_since is None or any(server.state is State.JOINING for server in self.servers):
                continue
            gone_s = _acting() - self._outage_since
            if gone_s >= patience_s:
                await self._end(patience_s)

    async def _end(self, waited_s: float) -> None:
        """Raises InferenceError with what is wrong with every server, and what to do where nobody starts them again.

        Where this process has no connection left to ask them with, it is not final: one that is started again has all.
        """
        complaints, is_ours = [], False
        for server in self.servers:
            state = await server.client.probe()
            if isinstance(state, Unwell):
                is_ours = is_ours or state.is_ours
                complaints.append(server.client.complaint(state, waited_s))
            else:
                complaints.append(f"the server at {server.name} cannot be used: {server.trouble}")
        if is_ours:
            raise InferenceError("; ".join(complaints))
        if not activity.is_supervised("inference"):
            complaints.append("where servers come back later than that, raise outage_timeout")
        raise of_server("inference")("; ".join(complaints))

    def _tell(self, event: str) -> None:
        _logger.warning("%s", event[0].upper() + event[1:])
        self._on_event(event)

    def _note_change(self) -> None:
        self._changed.set()
        self.on_change()
