"""One place in a pool of workers: the process in it, its successors when it dies, and the rollouts that it holds.

    run(request)   RolloutRequest -->            --> Rollout
                                     process
    score(ids)     ScoreGroup     -->            --> Generated, where a group is scored together

Every rollout that is given to a place ends in one Rollout, unless its caller cancels it: the process answers, or it
dies (`worker_died`), or it does not answer by the deadline and is killed (`timeout`). `suspects` says which of those
that a process held when it ended are to blame for that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from prime_rl import activity
from prime_rl.aio import acting_timeout
from prime_rl.environments.frames import Message, Unreadable
from prime_rl.environments.process import WorkerProcess
from prime_rl.environments.rollouts import (
    MAX_MESSAGE_CHARS,
    AvoidServers,
    CancelRollout,
    EnvironmentSpec,
    Failure,
    FailureKind,
    Generated,
    Rollout,
    RolloutRequest,
    ScoreGroup,
    WorkerReady,
    WorkerRefused,
    WorkerState,
    failed,
)
from prime_rl.environments.suspects import Running, Suspects
from prime_rl.environments.watch import MEMORY_EXIT
from prime_rl.errors import EnvironmentSetupError
from prime_rl.logs import get_logger

T = TypeVar("T", RolloutRequest, Rollout)

MAX_PAUSE_S: Final = 30.0
"""Longest pause before an environment that could not be loaded again is tried again."""
FIRST_LOADS: Final = 3
"""Times that an environment is loaded at first while something kills the process that loads it, or it takes too long:
of a slow download something stays each time; what hangs will hang again."""
SILENCE_S: Final = 2.0
"""A process of which nothing is heard for longer stands still; it tells its state every second."""

_logger = get_logger(__name__)


class _Undecided(EnvironmentSetupError):
    """The process was killed while it loaded, or was too slow, which may say nothing of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Patience with workers."""

    setup_s: float = 300.0
    """Seconds a worker may take to load its environment."""
    grace_s: float = 10.0
    """Seconds past a rollout's deadline after which its worker counts as stuck and is killed."""
    close_s: float = 5.0
    """Seconds a worker may take to end by itself."""
    max_restarts: int = 5
    """Times in a row, without a rollout completed in it in between, that a worker which died is replaced, and that one
    which does not come up is started again while no other does better; -1: always."""
    rollouts_per_worker: int = 64
    """Rollouts at the same time that one worker is thought to carry: with more, the pool grows."""
    idle_s: float = 60.0
    """Seconds that fewer workers would have been enough before one is let go."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """A rollout that was given to the process."""

    request: RolloutRequest
    future: asyncio.Future[Rollout]
    timer: asyncio.TimerHandle
    seconds: float
    """Its deadline, from when it was given."""
    began_at: float
    given_at: float
    stood_s: float
    """For how long the process had stood still by then, and what was granted since."""
    is_generated: bool = False
    """It waits for its group, and not for its own process."""
    is_overdue: bool = False
    """The process was killed, for it was past this one's deadline."""
    lost_s: float = field(default_factory=activity.lost_s)
    """Seconds for which this process had been stopped when the deadline was set."""


class Place:
    """A process at a time, from `__init__` until `close`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        limits: PoolLimits,
        log: Path,
        suspects: Suspects,
        *,
        is_first: bool,
        on_live: Callable[[], None],
        on_generated: Callable[[Place, int], None],
        is_hopeless: Callable[[], bool],
    ) -> None:
        """`on_live` is called whenever a process is ready, `on_generated` with the wire id of a rollout that is.

        `is_hopeless` says whether in no place a process comes up any more.
        `is_first`: nobody knows yet whether the environment can be loaded; if it cannot, it is given up at once.
        """
        self.ready: WorkerReady | None = None
        self.is_live = False
        self.is_retiring = False
        """It is given no new work."""
        self.num_restarts = 0
        self.lag_s = 0.0
        """By how much its event loop was late of late."""
        self._spec = spec
        self._limits = limits
        self._log = log
        self._suspects = suspects
        self._is_first = is_first
        self._on_live = on_live
        self._on_generated = on_generated
        self._is_hopeless = is_hopeless
        self._clock = asyncio.get_running_loop()
        self._process: WorkerProcess | None = None
        """The last that was started."""
        self._heard_at = 0.0
        """When the process sent something last."""
        self._stood_s = 0.0
        """For how long its event loop stood still, as it told."""
        self._held: dict[int, _Held] = {}
        self._deaths_in_a_row = 0
        """Of processes, without a rollout completed in one of them."""
        self._failed_loads = 0
        """In a row."""
        self._killed_for = ""
        self._avoided: frozenset[str] = frozenset()
        self._was_ready = asyncio.Event()
        self.served = asyncio.create_task(self._serve(), name=f"worker of {spec.label}")

    @property
    def load(self) -> int:
        """Rollouts that it holds."""
        return len(self._held)

    @property
    def does_not_come_up(self) -> bool:
        """Whether that was tried as often as is allowed."""
        return 0 <= self._limits.max_restarts < self._failed_loads

    def running(self) -> list[Running]:
        """The rollouts that run in the process, as far as is known: not those that wait for their group."""
        held = (one for one in self._held.values() if not one.future.done())
        return [self._running(one) for one in held if not one.is_generated]

    def holds(self, wire_id: int) -> bool:
        """Whether it is still to end this rollout."""
        return wire_id in self._held and not self._held[wire_id].future.done()

    async def wait_ready(self) -> WorkerReady:
        """What the first process says of the environment. Raises: EnvironmentSetupError."""
        is_ready = asyncio.ensure_future(self._was_ready.wait())
        try:
            await asyncio.wait([is_ready, self.served], return_when=asyncio.FIRST_COMPLETED)
            if self.served.done():
                await self.served
        finally:
            is_ready.cancel()
        assert self.ready is not None
        return self.ready

    async def run(self, request: RolloutRequest, *, wire_id: int) -> Rollout:
        """Run one rollout in the live process; `wire_id` is unique in the pool."""
        process = self._process
        assert process is not None
        seconds = request.timeout_s
        held = _Held(
            request=request, future=self._clock.create_future(), timer=self._timer(wire_id, seconds), seconds=seconds,
            began_at=self._clock.time(), given_at=self._clock.time(), stood_s=self._stood_s,
        )  # fmt: skip
        self._held[wire_id] = held
        try:
            process.frames.send(_with_id(request, wire_id))
            return await held.future
        except asyncio.CancelledError:
            process.frames.send(CancelRollout(id=wire_id))
            raise
        finally:
            held.timer.cancel()
            del self._held[wire_id]

    def score(self, wire_ids: Sequence[int]) -> None:
        """Have rollouts that were generated here scored as one group; they end with that."""
        for wire_id in wire_ids:
            held = self._held[wire_id]
            held.is_generated = False
            self._rearm(wire_id, held, self._spec.score_timeout_s or held.request.timeout_s)
        self._send(ScoreGroup(ids=list(wire_ids)))

    def keep(self, wire_ids: Sequence[int]) -> None:
        """These were generated and wait for others of their group, one of which was just begun: they wait on."""
        for wire_id in wire_ids:
            self._rearm(wire_id, self._held[wire_id], self._held[wire_id].request.timeout_s)

    def avoid(self, servers: frozenset[str]) -> None:
        """Send nothing to these servers."""
        self._avoided = servers
        if self.is_live:
            self._send(AvoidServers(servers=servers))

    async def close(self) -> None:
        """End the process: by closing its socket, then by force. Cancelled: by force at once."""
        self.served.cancel()
        try:
            await asyncio.wait([self.served])  # which, unlike awaiting it, never cancels it amid its clearing up
        except asyncio.CancelledError:
            if self._process is not None:
                self._process.reap()
            raise

    async def _serve(self) -> None:
        """One process after the other, until cancelled. Raises: EnvironmentSetupError when it is given up."""
        while True:
            try:
                reason = await self._serve_one()
            except EnvironmentSetupError as error:
                self._failed_loads += 1
                may_be_chance = isinstance(error, _Undecided) and self._failed_loads < FIRST_LOADS
                if self._is_first and self.ready is None and not may_be_chance:
                    raise
                reason = f"did not come up ({error})"
            else:
                self._deaths_in_a_row += 1
            if self._is_given_up():
                raise EnvironmentSetupError(
                    f"environment {self._spec.label!r}: a worker {reason}, "
                    f"{self._failed_loads or self._deaths_in_a_row} times in a row; {self._where_to_look}"
                )
            self.num_restarts += 1
            _logger.warning("Environment %s: a worker %s; starting another", self._spec.label, reason)
            if self._failed_loads:
                await asyncio.sleep(min(2.0 ** (self._failed_loads - 1), MAX_PAUSE_S))

    def _is_given_up(self) -> bool:
        """Whether its process is not to be replaced once more."""
        if self._failed_loads:
            return self.does_not_come_up and self._is_hopeless()
        return 0 <= self._limits.max_restarts < self._deaths_in_a_row

    async def _serve_one(self) -> str:
        """Start a process and serve it until it is gone. Returns how it ended.

        Raises: EnvironmentSetupError when it does not come up.
        """
        try:
            process = await WorkerProcess.start(self._log, self._spec.label)
        except OSError as error:
            raise EnvironmentSetupError(
                f"environment {self._spec.label!r}: its worker cannot be started: {error}; "
                "see how many processes and open files are allowed (ulimit -a), or lower workers_per_env"
            ) from error
        self._process = process
        self._killed_for = ""
        patience_s = 0.0  # one that is loading would see that its socket is closed only once it has loaded
        reason, is_death = "was ended", False
        try:
            await self._handshake(process)
            patience_s = self._limits.close_s
            self._begin()
            while (message := await process.frames.read()) is not None:
                self._take(message)
            self.is_live = False
            reason = self._ending(await process.end(patience_s))
            is_death = True
            return reason
        finally:
            self.is_live = False
            try:
                await process.end(patience_s)
            finally:
                self._fail_held(reason, is_death=is_death)

    async def _handshake(self, process: WorkerProcess) -> None:
        """Have it load the environment. Raises: EnvironmentSetupError."""
        process.frames.send(self._spec)
        try:
            owner, setup_s = f"environment {self._spec.label}", self._limits.setup_s
            with activity.waiting(owner, "a worker to load it", deadline_s=setup_s):
                async with acting_timeout(setup_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                    answer = await process.frames.read()
        except TimeoutError:
            raise _Undecided(
                f"environment {self._spec.label!r} was not loaded within {self._limits.setup_s:g} s; "
                f"{self._where_to_look}, or raise env_setup_timeout"
            ) from None
        if isinstance(answer, WorkerRefused):
            raise EnvironmentSetupError(answer.message)
        if not isinstance(answer, WorkerReady):
            code = await process.end(self._limits.close_s)
            kind = _Undecided if code is not None and code < 0 else EnvironmentSetupError
            ending = self._ending(code)
            raise kind(f"environment {self._spec.label!r}: its worker {ending} while it loaded; {self._where_to_look}")
        self.ready = answer

    def _begin(self) -> None:
        """The process is ready for rollouts."""
        if self._avoided:
            self._send(AvoidServers(servers=self._avoided))
        self._failed_loads = 0
        self.lag_s = self._stood_s = 0.0
        self._heard_at = self._clock.time()
        self.is_live = True
        self._was_ready.set()
        self._on_live()

    def _take(self, message: Message | Unreadable) -> None:
        self._heard_at = self._clock.time()
        if isinstance(message, Rollout):
            self._finish(message.id, message)
        elif isinstance(message, WorkerState):
            self.lag_s, self._stood_s = message.lag_s, message.stood_s
        elif isinstance(message, Generated) and self.holds(message.id):
            held = self._held[message.id]
            held.is_generated = True
            self._rearm(message.id, held, held.request.timeout_s)
            self._on_generated(self, message.id)
        elif isinstance(message, Unreadable):
            why = f"what the environment made of it cannot be read: {message.why}"
            self._finish(message.number, Failure(kind=FailureKind.ENVIRONMENT, message=why[:MAX_MESSAGE_CHARS]))

    @property
    def _where_to_look(self) -> str:
        return "set log.env_worker_logs to see why" if self._log == Path(os.devnull) else f"see {self._log}"

    def _timer(self, wire_id: int, seconds: float) -> asyncio.TimerHandle:
        return self._clock.call_later(seconds + self._limits.grace_s, self._overdue, wire_id)

    def _rearm(self, wire_id: int, held: _Held, seconds: float) -> None:
        held.timer.cancel()
        held.seconds, held.given_at, held.stood_s = seconds, self._clock.time(), self._stood_s
        held.lost_s = activity.lost_s()
        held.timer = self._timer(wire_id, seconds)

    def _more_time(self, held: _Held) -> float:
        """Seconds for which a rollout may take longer, because its process stood still on account of another."""
        lost_s, held.stood_s = self._stood_s - held.stood_s, self._stood_s
        now = self._clock.time()
        if lost_s > 0 or now - self._heard_at < SILENCE_S:
            return lost_s
        # One of those that it had by then holds its event loop, and is interrupted at its own deadline.
        known = (one for one in self._held.values() if one.given_at < self._heard_at + SILENCE_S)
        return max((one.timer.when() for one in known if not one.is_generated), default=now) - now

    def _overdue(self, wire_id: int) -> None:
        """Nothing was heard of a rollout by its deadline, by which its process, if it is not stuck, has ended it."""
        if not self.holds(wire_id):
            return
        held = self._held[wire_id]
        if (stopped_s := activity.lost_s() - held.lost_s) > 0:  # we were: what the process has sent is not read yet
            held.lost_s += stopped_s
            held.timer = self._clock.call_later(stopped_s, self._overdue, wire_id)
            return
        if (seconds := self._more_time(held)) > 0:
            held.timer = self._clock.call_later(seconds, self._overdue, wire_id)
            return
        if held.is_generated:
            message = f"waited {held.seconds:g} s for the other rollouts of its group"
            self._send(CancelRollout(id=wire_id))
            self._fail(held, FailureKind.TIMEOUT, message, is_counted=True)
            return
        held.is_overdue = True
        if self.is_live and self._process is not None:
            _logger.warning("Environment %s: a worker does not answer; killing it", self._spec.label)
            self._killed_for = "did not answer and was killed"
            self.is_live = False
            self._process.kill()

    def _send(self, message: Message) -> None:
        if self._process is not None:
            self._process.frames.send(message)

    def _finish(self, wire_id: int, end: Rollout | Failure) -> None:
        """The process told how a rollout ended."""
        if not self.holds(wire_id):
            return
        held = self._held[wire_id]
        self._deaths_in_a_row = 0
        self._suspects.ended(held.request)
        if isinstance(end, Failure):
            end = failed(held.request, self._spec.label, end)
        held.future.set_result(_with_id(end, held.request.id))

    def _fail_held(self, reason: str, *, is_death: bool) -> None:
        """The process is gone, and `is_death`: by itself, or for what ran in it. One of them at least is counted."""
        held = [one for one in self._held.values() if not one.future.done()]
        running = [one for one in held if not one.is_generated]
        waiting = [one for one in held if one.is_generated]
        blamed = [False] * len(running)
        if is_death:
            blamed = self._suspects.died_with(self, [self._running(one) for one in running], self._clock.time())
        is_counted = is_death and not any(blamed)
        for one, is_own in zip([*running, *waiting], [*blamed, *[False] * len(waiting)], strict=True):
            kind, message = FailureKind.WORKER_DIED, f"the worker process {reason} while the rollout ran in it"
            if one.is_generated:
                message = f"the worker process {reason} while the rollout waited in it for its group"
            elif one.is_overdue:
                kind, message = FailureKind.TIMEOUT, f"took longer than {one.seconds:g} s, and its worker was blocked"
            self._fail(one, kind, message, is_own=is_own, is_counted=is_counted)
            is_counted = False

    def _fail(
        self, held: _Held, kind: FailureKind, message: str, *, is_own: bool = False, is_counted: bool = False
    ) -> None:
        failure = Failure(kind=kind, message=message, is_own=is_own, is_counted=is_counted)
        held.future.set_result(failed(held.request, self._spec.label, failure))

    def _running(self, held: _Held) -> Running:
        return Running(held.request, self._clock.time() - held.began_at)

    def _ending(self, code: int | None) -> str:
        if self._killed_for:
            return self._killed_for
        if code is None:
            return "closed its connection and does not end"
        if code == MEMORY_EXIT:
            return f"was ended for holding more than max_memory_gb = {self._spec.max_memory_gb:g}"
        return f"ended with exit code {code}" if code >= 0 else f"ended with {signal.Signals(-code).name}"


def _with_id(message: T, message_id: int) -> T:
    return msgspec.structs.replace(message, id=message_id)
