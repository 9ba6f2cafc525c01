"""Starts rollouts: those of training and, beside them, those of whatever else wants some, such as an evaluation.

training --+
           +--> dispatcher --(a server with the newest weights, room)--> a task each
another  --+

loop           consumes            waits for                   unblocked by
dispatcher     jobs of the sources room, and a server          `wake`; time, where a rate limit is all that holds
job (each)     itself              its rollout                 its own deadline
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from prime_rl.aio import Supervisor
from prime_rl.orchestrator.concurrency import Concurrency
from prime_rl.orchestrator.fleet import Fleet

BURST: Final = 64
"""Rollouts that are started before other tasks have a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to run."""

    key: Hashable
    """Names it among all jobs."""
    group: Hashable
    """Jobs of one group are sent to one server, whose cache then knows their prompt."""
    version: int
    """The oldest weights that may sample it."""
    run: Callable[[tuple[str, ...]], Coroutine[Any, Any, None]]
    """Runs it to its end, and notes how it ended. It is given addresses, in the order in which to try them."""


class Source(Protocol):
    """Something that wants rollouts to be run. Times are those of the event loop."""

    def wants(self, now: float) -> bool:
        """Whether `next` would give a job. It may err by saying yes."""
        ...

    def next(self, now: float) -> Job | None:
        """A job, which is started at once; None while there is none."""
        ...

    def delay(self, now: float) -> float | None:
        """Seconds after which it may want more, though nothing happens until then. None: it says so itself (`wake`)."""
        ...


class Dispatcher:
    """Takes jobs from its sources while there is room for them."""

    def __init__(
        self,
        fleet: Fleet,
        supervisor: Supervisor,
        concurrency: Concurrency,
        sources: Mapping[str, Source],
        *,
        version: Callable[[], int],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`sources` by name, as `concurrency` knows them. `version`: that of the weights which are served. `on_end`:
        called after every job, of whatever source."""
        self.concurrency = concurrency
        self._fleet = fleet
        self._supervisor = supervisor
        self._sources = dict(sources)
        self._version = version
        self._on_end = on_end
        self._jobs: dict[Hashable, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There may be room, or something to run."""
        self._wake.set()

    def cancel(self, key: Hashable) -> None:
        """End a job before its time; one that has ended is no harm."""
        if key in self._jobs:
            self._jobs[key].cancel()

    # Consumes: jobs. Waits for: room, and a server. Unblocked by: `wake`, and time.
    async def run(self) -> None:
        """Returns never."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            started = 0
            while self._fleet.may_assign(self._version()) and self._start_one(loop.time()):
                started += 1
                if started % BURST == 0:
                    await asyncio.sleep(0)
            delays = [delay for source in self._sources.values() if (delay := source.delay(loop.time())) is not None]
            timer = loop.call_later(min(delays), self.wake) if delays else None
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _start_one(self, now: float) -> bool:
        """Start a job of the source that has least of its share. Returns whether there was one."""
        concurrency = self.concurrency
        wanting = [name for name, source in self._sources.items() if source.wants(now)]
        for name in concurrency.next_of(wanting):
            if (job := self._sources[name].next(now)) is not None:
                servers = self._fleet.assign(job.key, job.group, job.version)
                concurrency.start(name)
                task = self._jobs[job.key] = self._supervisor.start(f"rollout {job.key}", job.run(servers))
                task.add_done_callback(partial(self._ended, name, job.key))
                return True
        return False

    def _ended(self, name: str, key: Hashable, _: asyncio.Task[None]) -> None:
        self._fleet.release(key)
        del self._jobs[key]
        self.concurrency.end(name)
        self._on_end()
        self.wake()
