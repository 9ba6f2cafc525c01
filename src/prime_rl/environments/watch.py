"""A worker's watch over itself, from a thread beside its event loop.

    lag      by how much the loop is late, told to the parent, which sizes the pool by it
    steps    code that does not give the loop back within its deadline is interrupted where it is; the deadlines of all
             others are put off by what it took
    memory   a worker that holds more than it may, ends
    parent   is another thread's matter (`lifeline`)

Somebody else's reward function may compute without end, in a plain loop that no `asyncio.timeout` can end. So the
thread notices that the loop stands still and sends this process a signal, whose handler runs in the main thread, inside
the very code that blocks: it raises `Overran` there, if the deadline of that code, which is in its context, has passed,
and else notes whose code it is. What does not even let Python's signal handlers run (a long call into C) is left to the
parent, which kills the worker.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import psutil

from prime_rl.logs import get_logger

TICK_S: Final = 0.1
"""Time between two beats of the event loop, and between two looks of the thread."""
STANDSTILL_S: Final = 0.5
"""A loop that is late by more stands still: somebody's code holds it."""
LOST_S: Final = 2 * STANDSTILL_S
"""A loop that was late by more cost others time. Whose code it was has been noted by then."""
MEMORY_INTERVAL_S: Final = 1.0
MEMORY_EXIT: Final = 86
"""Exit code of a worker that held too much memory."""
SIGNAL: Final = signal.SIGUSR2
GIB: Final = 1 << 30

_logger = get_logger(__name__)


class Overran(BaseException):
    """The code in which it is raised took longer than its deadline, and held the event loop meanwhile.

    No `Exception`: the `except Exception` of a reward function, which makes of it a reward of 0, must not catch it.
    """


@dataclass(slots=True, kw_only=True, eq=False)
class Deadline:
    """When a piece of work must have ended, in `time.monotonic` seconds."""

    at: float
    outer: Deadline | None = None
    """A later one around it."""
    was_cut: bool = False
    """It was interrupted. True even where its code caught what was raised in it."""
    has_expired: bool = False
    """It passed while the work waited."""
    began_at: float = field(default_factory=time.monotonic)
    held_s: float = 0.0
    """Of the standstill that goes on, the share of its own code."""

    def give_back(self, seconds: float) -> None:
        """The loop stood still for `seconds` until now: what of it is not its own doing, it gets more."""
        lost_s = min(seconds, time.monotonic() - self.began_at)
        self.at += max(0.0, lost_s - self.held_s)


_deadline: ContextVar[Deadline | None] = ContextVar("_deadline", default=None)
_running: set[Deadline] = set()
"""Those of all work that is not over."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[Deadline]:
    """What runs in here, and in tasks that are started in here, is interrupted when it still holds the loop after
    `seconds` (None: ever). An earlier deadline around it stays in force."""
    outer = _deadline.get()
    at = math.inf if seconds is None else time.monotonic() + seconds
    own = outer if outer is not None and outer.at <= at else Deadline(at=at, outer=outer)
    token = _deadline.set(own)
    _running.add(own)
    try:
        yield own
    finally:
        _deadline.reset(token)
        if own is not outer:
            _running.discard(own)
            own.at = math.inf  # a task that was started in here and lives on is not to be interrupted


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[Deadline]:
    """A `deadline` for code that waits, too. Raises: TimeoutError when it passed while the code waited."""
    outer = _deadline.get()
    with deadline(seconds) as own:
        if own is outer or own.at == math.inf:
            yield own
            return
        loop = asyncio.get_running_loop()
        context = Context()  # in which there is no deadline: what is below must not be interrupted
        handle: asyncio.Handle
        async with asyncio.timeout(None) as timer:

            def look() -> None:
                nonlocal handle
                # After all that is due by now: if the loop stood still, the deadline is about to be put off.
                handle = loop.call_soon(expire, context=context)

            def expire() -> None:
                nonlocal handle
                left_s = own.at - time.monotonic()
                if left_s > 0:
                    handle = loop.call_later(left_s, look, context=context)
                    return
                own.has_expired = True
                timer.reschedule(loop.time())

            handle = loop.call_later(own.at - time.monotonic(), look, context=context)
            try:
                yield own
            finally:
                handle.cancel()


@dataclass(slots=True, kw_only=True)
class Watch:
    """The watch of this process. `start` it in the event loop, once, and `stop` it before the loop ends."""

    max_memory_gb: float | None = None
    worst_lag_s: float = 0.0
    """The largest lag since `take_lag`."""
    stood_s: float = 0.0
    """For how long the loop stood still, all in all."""
    _beat_at: float = field(default_factory=time.monotonic)
    _noted_at: float = 0.0
    """When it was last noted whose code holds the loop."""
    _is_over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin. Must be called in the main thread, within the event loop."""
        self._beat_at = time.monotonic()
        signal.signal(SIGNAL, self._interrupt)
        self._beat()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Interrupt nothing any more."""
        self._is_over.set()

    def take_lag(self) -> float:
        """The largest lag since the last call, in seconds."""
        lag_s, self.worst_lag_s = self.worst_lag_s, 0.0
        return lag_s

    def forget_lag(self) -> None:
        """The loop was late for a good reason."""
        self._beat_at = time.monotonic()
        self.worst_lag_s = self.stood_s = 0.0

    def _beat(self) -> None:
        now = time.monotonic()
        lag_s = now - self._beat_at - TICK_S
        self.worst_lag_s = max(self.worst_lag_s, lag_s)
        self._beat_at = now
        if lag_s > LOST_S:
            self.stood_s += lag_s
            for work in _running:
                work.give_back(lag_s)
        if lag_s > STANDSTILL_S:
            for work in _running:
                work.held_s = 0.0
        if not self._is_over.is_set():
            asyncio.get_running_loop().call_later(TICK_S, self._beat)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. Python runs it in the main thread and in the context of the code that is running there.

        Amid asyncio's own functions nothing is raised: a task that is being made would be left without its first step,
        and others that wait for the same event would not be woken. Neither is it amid ours. A later look meets the
        code that called them.
        """
        now = time.monotonic()
        seconds = now - max(self._beat_at, self._noted_at)
        self._noted_at = now
        current = work = _deadline.get()
        while work is not None:
            work.held_s += seconds
            work = work.outer
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        is_ours = module == __name__ or module.partition(".")[0] in ("asyncio", "contextlib")
        if current is not None and now > current.at and not is_ours:
            current.was_cut = True
            raise Overran

    def _look(self) -> None:
        """The thread."""
        process = psutil.Process()
        main = threading.main_thread().ident
        assert main is not None
        look_at_memory_at = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            if now - self._beat_at > TICK_S + STANDSTILL_S:
                signal.pthread_kill(main, SIGNAL)
            if self.max_memory_gb is not None and now >= look_at_memory_at:
                look_at_memory_at = now + MEMORY_INTERVAL_S
                if memory_of(process) > self.max_memory_gb * GIB:
                    _logger.error("This worker holds more than max_memory_gb = %g; ending it", self.max_memory_gb)
                    _end_with_children(process)


def memory_of(process: psutil.Process) -> int:
    """Bytes that a process and its descendants hold in memory."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.Error:  # it is gone, or somebody else's
            continue
    return total


def _end_with_children(process: psutil.Process) -> None:
    for child in process.children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(MEMORY_EXIT)


def limit_cpu(*, num_cpus: int | None, first_cpu: int, niceness: int) -> None:
    """Keep this process, and what it starts, to its share of the machine.

    Cores are those numbered `first_cpu` on, round the ones that this process may use. Only Linux can bind to cores.
    """
    if niceness:
        os.nice(niceness)
    if num_cpus is None:
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cpus))
    if not hasattr(os, "sched_setaffinity"):
        _logger.warning("This system binds no process to cores: max_cpus limits its threads alone")
        return
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[(first_cpu + place) % len(allowed)] for place in range(num_cpus)})
