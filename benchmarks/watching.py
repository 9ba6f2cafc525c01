"""Watches processes while they work: how late an event loop is, what CPU time goes to, how memory grows."""

import asyncio
import contextlib
import gc
import json
import math
import os
import signal
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

BEAT_S = 0.005
SAMPLE_S = 0.005
STALL_S = 0.05
STEP_S = 1e-4
WRITE_INTERVAL_S = 5.0
NUM_BLOCKS = 10
BLOCK_S = 60.0
WAITING = ("selectors.py", "select")
"""File and function in which an event loop waits."""
LOOP = ("base_events.py", "_run_once")
"""Those that call all that runs in it."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OURS = f"{os.sep}prime_rl{os.sep}"
INSTALLED = f"{os.sep}site-packages{os.sep}"
LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class Durations:
    """Seconds, to `STEP_S`. Any number of them takes little memory: a watch must not grow beside what it watches."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total_s = 0.0

    def __len__(self) -> int:
        return self.counts.total()

    def note(self, seconds: float) -> None:
        self.counts[math.ceil(seconds / STEP_S)] += 1
        self.total_s += seconds

    def percentile(self, percent: float) -> float:
        """The seconds that so many percent do not exceed. NaN for none.

        Example: of 1, 2, 3 and 4 s, percentile(50) == 2
        """
        missing = math.ceil(len(self) * percent / 100)
        for step in sorted(self.counts):
            missing -= self.counts[step]
            if missing <= 0:
                return step * STEP_S
        return float("nan")


@dataclass(kw_only=True)
class Beats:
    """How late the event loop is, looked at every `BEAT_S`."""

    lags: Durations = field(default_factory=Durations)
    """By how much later than asked for the loop came back."""
    busy: Durations = field(default_factory=Durations)
    """CPU time of the loop's thread from one look to the next: what the lag would be on a machine for itself."""
    last: float = 0.0

    def restart(self) -> None:
        """Forget what was seen."""
        self.lags, self.busy = Durations(), Durations()

    async def run(self) -> None:
        """Returns never."""
        while True:
            self.last, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            self.lags.note(max(0.0, time.monotonic() - self.last - BEAT_S))
            self.busy.note(time.thread_time() - cpu)


class Sampler:
    """What the main thread's CPU time goes to. Context manager; for the main thread.

    A signal after each `SAMPLE_S` of the process' CPU time looks at the main thread's stack. A thread that looks would
    wait for the interpreter's lock, and so see most what gives it up: system calls.
    """

    def __init__(self, beats: Beats | None = None) -> None:
        self.restart()
        self._beats = beats
        self._is_looking = False

    def restart(self) -> None:
        """Forget what was seen."""
        self.places: Counter[str] = Counter()
        """Seconds by the innermost function of ours, and the innermost of all."""
        self.groups: Counter[str] = Counter()
        """Seconds by the innermost module of ours, or package of others."""
        self.late: Counter[str] = Counter()
        """As `places`, while the loop was late by more than `STALL_S`."""
        self.num_samples = 0
        self._main_s = time.thread_time()

    def __enter__(self) -> "Sampler":
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._is_looking or frame is None:
            return
        self._is_looking = True
        before, self._main_s = self._main_s, time.thread_time()
        seconds, place = self._main_s - before, where(frame)
        self.num_samples += 1
        self.places[place] += seconds
        self.groups[group_of(frame)] += seconds
        if self._beats is not None and time.monotonic() - self._beats.last > BEAT_S + STALL_S:
            self.late[place] += seconds
        self._is_looking = False


class SamplerToFile(threading.Thread):
    """Samples this process until it ends, and keeps what it saw in `<directory>/<process id>.json`.

    Start it in the main thread."""

    def __init__(self, directory: Path) -> None:
        super().__init__(name="profile", daemon=True)
        self._path = directory / f"{os.getpid()}.json"
        self._sampler = Sampler()
        self._sampler.__enter__()

    def run(self) -> None:
        while True:
            time.sleep(WRITE_INTERVAL_S)
            seen = {"groups": dict(self._sampler.groups), "places": dict(self._sampler.places)}
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(seen))
            draft.replace(self._path)


def where(frame: FrameType) -> str:
    """Innermost function of ours > innermost function of all."""
    leaf = frame.f_code
    if _is(frame, WAITING):
        return "asking for sockets and timers that are ready (system calls)"
    leaf_name = f"{_module(leaf.co_filename)}:{leaf.co_qualname}"
    walk: FrameType | None = frame
    while walk is not None and not _is(walk, LOOP):
        code = walk.f_code
        if OURS in code.co_filename:
            ours = f"{_module(code.co_filename)}:{code.co_qualname}"
            return ours if code is leaf else f"{ours} > {leaf_name}"
        walk = walk.f_back
    return leaf_name


def group_of(frame: FrameType) -> str:
    """Innermost module of ours, or package that was installed; else it is Python's own, which is the event loop."""
    walk: FrameType | None = frame
    while walk is not None and not _is(walk, LOOP):
        path = walk.f_code.co_filename
        if OURS in path:
            return path.rpartition(OURS)[2].removesuffix(".py").removesuffix(f"{os.sep}__init__")
        if INSTALLED in path:
            return path.rpartition(INSTALLED)[2].partition(os.sep)[0].removesuffix(".py")
        if not path.startswith((LIBRARY, "<")):
            return Path(path).stem
        walk = walk.f_back
    return "asyncio"


def _is(frame: FrameType, place: tuple[str, str]) -> bool:
    file, function = place
    return frame.f_code.co_name == function and os.path.basename(frame.f_code.co_filename) == file


def _module(path: str) -> str:
    return "/".join(Path(path).with_suffix("").parts[-2:])


class Collections:
    """CPU time of the garbage collector in this process. Context manager."""

    def __init__(self) -> None:
        self.restart()
        self._started = 0.0

    def restart(self) -> None:
        """Forget what was seen."""
        self.all, self.full = Durations(), Durations()

    def __enter__(self) -> "Collections":
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._started = time.thread_time()
            return
        seconds = time.thread_time() - self._started
        self.all.note(seconds)
        if info["generation"] == 2:
            self.full.note(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process, or a thread, has used up to a time."""

    at: float
    cpu_s: float
    kernel_s: float
    """Of it in the kernel."""
    main_s: float
    """Of it in the main thread."""
    rss_mib: float


def usage(pid: int) -> Usage | None:
    """None: it is gone."""
    try:
        process = _stat(Path(f"/proc/{pid}/stat"))
        main = _stat(Path(f"/proc/{pid}/task/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Usage(
        at=time.monotonic(),
        cpu_s=_cpu_s(process),
        kernel_s=process[12] / TICKS_PER_S,
        main_s=_cpu_s(main),
        rss_mib=process[21] * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def _stat(path: Path) -> list[int]:
    """What the kernel says of a process or thread, from the field after its state on."""
    return [0, *(int(word) for word in path.read_text().rpartition(")")[2].split()[1:])]


def _cpu_s(stat: Sequence[int]) -> float:
    return (stat[11] + stat[12]) / TICKS_PER_S


def threads() -> Counter[str]:
    """CPU seconds of this process' threads that live, by name; the number at a name's end is left out."""
    seconds: Counter[str] = Counter()
    for thread in threading.enumerate():
        try:
            stat = _stat(Path(f"/proc/self/task/{thread.native_id}/stat"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds[thread.name.rstrip("0123456789_-")] += _cpu_s(stat)
    return seconds


def children(pid: int) -> list[int]:
    """Processes that this one started and that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line through the points with the least squares, and its standard error; NaN for too few points.

    What is looked at each second says much the same as a second ago, so the line is that through the means of blocks
    of about `BLOCK_S` seconds, or of `NUM_BLOCKS` shorter ones. Their deviations count as independent.

    Example: trend([(0, 1), (1, 3), (2, 5)]) == (2, 0)
    """
    if len(points) < 3:
        return float("nan"), float("nan")
    first, span = points[0][0], points[-1][0] - points[0][0]
    num = max(NUM_BLOCKS, int(span / BLOCK_S))
    blocks: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        blocks.setdefault(min(num - 1, int(num * (x - first) / span)), []).append((x, y))
    means = [(fmean(x for x, _ in block), fmean(y for _, y in block)) for block in blocks.values()]
    mean_x, mean_y = fmean(x for x, _ in means), fmean(y for _, y in means)
    spread = sum((x - mean_x) ** 2 for x, _ in means)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in means) / spread
    misfit = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in means)
    return slope, math.sqrt(misfit / (len(means) - 2) / spread)
