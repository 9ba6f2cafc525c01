"""What this process is at, and for whom it waits: kept current in `activity/<process>.json` by a thread.

    with activity.doing("training step 12"):
        ...
    with activity.waiting("orchestrator", "batch 13", deadline_s=3600.0) as wait:
        while not batch.exists():
            if wait.is_overdue:
                raise DeadlineExceeded(...)

A change costs microseconds, for the thread writes: once a second, and at once where something changed. It never fails a
run. Before `start` all of this is noted and written nowhere. Who reads it: `rl --status`, and the launcher, which
starts a process that hangs again (`causes`).

The same thread notices when this process was stopped (SIGSTOP, a suspended machine): `clock` leaves that time out, so
that no deadline runs out while nobody could act.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from prime_rl import lifeline
from prime_rl.activity import files
from prime_rl.activity.files import Report
from prime_rl.logs import get_logger

Text = str | Callable[[], str]
"""Words, or what gives them when they are written: in the thread, at most about once a second."""

NAME: Final = "PRIME_RL_PROCESS"
"""Environment variable: the launcher's name for a process that it starts, such as `inference-1`."""
SUPERVISED: Final = "PRIME_RL_SUPERVISED"
"""Environment variable: the names of the processes that a launcher starts again where they are past a deadline."""

DISK: Final = "disk"
"""The owner of a wait for something that is no process, and that nobody starts again."""

BEAT_S: Final = 1.0
SHORTEST_S: Final = 0.1
"""Between two reports, however much changes."""
SLACK_S: Final = 2.0
"""A thread that sleeps BEAT_S and wakes later than this was not let run: the process was stopped."""


class _Beats:
    """When the thread had its last turn, and how long this process could not act until then."""

    def __init__(self) -> None:
        self._state = float("inf"), 0.0
        """Exchanged whole, since others read it at any time."""

    def beat(self) -> None:
        """In the thread."""
        lost_s = self._lost_s(time.monotonic())
        self._state = time.monotonic(), lost_s

    def clock(self) -> float:
        state = self._state  # first: a stop between the two lines is then in what was lost
        now = time.monotonic()
        return now - self._lost_s(now, state)

    def lost_s(self) -> float:
        state = self._state
        return self._lost_s(time.monotonic(), state)

    def _lost_s(self, now: float, state: tuple[float, float] | None = None) -> float:
        beat_at, lost_s = state or self._state
        return lost_s + max(0.0, now - beat_at - SLACK_S)


_logger = get_logger(__name__)
_beats = _Beats()


def clock() -> float:
    """Seconds of `time.monotonic` without those in which this process was stopped. It never goes back."""
    return _beats.clock()


def lost_s() -> float:
    """Seconds for which this process was stopped so far."""
    return _beats.lost_s()


class Task:
    """Something that this process is at."""

    def __init__(self, reporter: _Reporter, text: Text, deadline_s: float | None) -> None:
        self._reporter = reporter
        self._text = text
        self._said = text if isinstance(text, str) else ""
        self._deadline_s = deadline_s
        self._since = time.time()
        self._got_on_at = clock()

    def begin(self) -> Self:
        """It is under way from now on, until `end`; for what no block of code surrounds."""
        self._reporter.add(self)
        return self

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """It is over. Again is no harm."""
        self._reporter.remove(self)

    @property
    def seconds(self) -> float:
        """Since it began, or got further."""
        return clock() - max(self._got_on_at, self._reporter.got_on_at)

    def said(self) -> str:
        """Its words. Those of before where they cannot be had: what they are made of changes meanwhile."""
        if not isinstance(self._text, str):
            with contextlib.suppress(Exception):
                self._said = self._text()
        return self._said

    def shown(self) -> files.Doing:
        return files.Doing(text=self.said(), since=self._since, for_s=self.seconds, deadline_s=self._deadline_s)


class Waiting(Task):
    """A wait for another process."""

    def __init__(self, reporter: _Reporter, owner: str, reason: Text, deadline_s: float | None) -> None:
        super().__init__(reporter, reason, deadline_s)
        self._owner = owner

    def is_for(self, owner: str) -> bool:
        """Whether it is a wait for this one."""
        return self._owner == owner

    def renew(self, at: float | None = None) -> None:
        """Some of what is waited for has come, now or `at` (of `clock`): the deadline begins anew."""
        self._got_on_at = max(self._got_on_at, clock() if at is None else at)

    @property
    def seconds(self) -> float:
        """Since it began, or was renewed."""
        return clock() - self._got_on_at

    @property
    def patience_s(self) -> float:
        """Seconds after which this process gives up. Infinite without a deadline."""
        return float("inf") if self._deadline_s is None else patience_s(self._deadline_s, self._owner)

    @property
    def is_overdue(self) -> bool:
        """Whether this process is to give up."""
        return self.seconds >= self.patience_s

    def as_wait(self) -> files.Wait:
        return files.Wait(
            owner=self._owner,
            reason=self.said(),
            since=self._since,
            waited_s=self.seconds,
            deadline_s=self._deadline_s,
        )


class _Reporter:
    """The tasks of this process, and the thread that writes them down."""

    def __init__(self) -> None:
        self._tasks: dict[int, Task] = {}
        self._children: dict[str, str] = {}
        self._looped_at: float | None = None
        self._stepped_at: float | None = None
        self.got_on_at = 0.0
        """When whatever this process is at got further last."""
        self.name = ""
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._directory: Path | None = None
        self._process = self._token = self._host = ""
        self._has_begun = False
        self._began_at = 0.0
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, directory: Path, process: str, *, makes_directory: bool) -> None:
        """Write reports from now on."""
        self._directory, self._process, self._began_at = directory, process, clock()
        self._token, self._host = lifeline.launcher_token(), socket.gethostname()
        self._is_over = False
        if makes_directory:
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
        self._changed.set()
        if self._thread is None or not self._thread.is_alive():
            _beats.beat()
            self._thread = threading.Thread(target=self._run, name="activity", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Write the last report."""
        self._is_over = True
        self._write()

    def add(self, task: Task) -> None:
        self._has_begun = True
        self._tasks[id(task)] = task
        self._changed.set()

    def remove(self, task: Task) -> None:
        if self._tasks.pop(id(task), None) is not None:
            self._changed.set()

    def add_child(self, name: str, token: str) -> None:
        self._children[name] = token
        self._changed.set()

    def remove_child(self, name: str) -> None:
        if self._children.pop(name, None) is not None:
            self._changed.set()

    def got_on(self) -> None:
        self.got_on_at = clock()

    def looped(self) -> None:
        self._looped_at = clock()

    def stepped(self) -> None:
        self._stepped_at = clock()

    def _run(self) -> None:
        while not self._is_over:
            self._changed.wait(BEAT_S)
            self._changed.clear()
            _beats.beat()
            try:
                self._write()
            except Exception:  # a supervision point: no report is worth a run, nor the clock
                _logger.debug("No report was written", exc_info=True)
            time.sleep(SHORTEST_S)

    def _write(self) -> None:
        directory = self._directory
        if directory is None:
            return
        with self._writing:
            try:
                files.write_report(directory, self._report())
            except OSError:  # a full disk, most likely: what is there stays, and is known to be kept current
                with contextlib.suppress(OSError):
                    files.touch_report(directory, self._process)

    def _report(self) -> Report:
        tasks = list(self._tasks.values())
        if not self._has_begun:
            tasks = [Task(self, "starting", None)]
        waits = [task.as_wait() for task in tasks if isinstance(task, Waiting)]
        return Report(
            process=self._process,
            token=self._token,
            host=self._host,
            time=time.time(),
            beat=time.monotonic(),
            age_s=clock() - self._began_at,
            doing=tuple(task.shown() for task in tasks if not isinstance(task, Waiting)),
            waits=tuple(sorted(waits, key=lambda wait: -wait.waited_s)),
            got_on_s=clock() - self.got_on_at if self.got_on_at else None,
            loop_s=None if self._looped_at is None else clock() - self._looped_at,
            engine_s=None if self._stepped_at is None else clock() - self._stepped_at,
            children=dict(self._children),
            ended=self._is_over,
        )


_here = _Reporter()


def start(directory: Path, process: str, *, rank: int = 0) -> None:
    """Keep `directory/<process>.json` current until this process ends. The launcher's name for it comes first.

    `rank`: among processes that do its work together; the first makes the directory.
    """
    name = os.environ.get(NAME) or process
    _here.name = name
    _here.start(directory, name if rank == 0 else f"{name}-{rank}", makes_directory=rank == 0)


def own_name() -> str:
    """The name under which this process reports, and other ranks of it; "" before `start`."""
    return _here.name


def doing(text: Text, *, deadline_s: float | None = None) -> Task:
    """What this process is at while the block runs. `deadline_s`: it hangs where it takes longer without a `beat`."""
    return Task(_here, text, deadline_s)


def waiting(owner: str, reason: Text, *, deadline_s: float | None) -> Waiting:
    """What this process waits for while the block runs, from whom, and for how long at most.

    It ends nothing: whoever waits asks `is_overdue`, or has a deadline of its own.
    """
    return Waiting(_here, owner, reason, deadline_s)


def is_supervised(owner: str) -> bool:
    """Whether a launcher starts `owner` again where it died or hangs. Of what it did not start, it never does."""
    names = os.environ.get(SUPERVISED, "").split(",")
    return any(files.is_of(name, owner) for name in names)


def patience_s(deadline_s: float, owner: str) -> float:
    """Seconds after which a process gives up a wait: twice the deadline where a launcher, at the deadline, starts again
    whom it waits for, who then has as long again."""
    return deadline_s * (2 if is_supervised(owner) else 1)


def beat() -> None:
    """What this process is at got further: its deadline begins anew, and nobody who waits for it blames it. Costs less
    than a microsecond."""
    _here.got_on()


def loop_beat() -> None:
    """The event loop of this process has a turn. To be called about once a second or more often."""
    _here.looped()


def engine_beat() -> None:
    """The engine of this process has taken a step, or has nothing to do. To be called as often."""
    _here.stepped()


def child_started(name: str, pid: int) -> None:
    """This process watches another one."""
    if (token := lifeline.token_of(pid)) is not None:
        _here.add_child(name, token)


def child_ended(name: str) -> None:
    """It is gone, and was seen to be."""
    _here.remove_child(name)
