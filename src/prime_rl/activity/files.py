"""`activity/<process>.json`: what a process is at, and for whom it waits. Both ends of the file; pure but for the disk.

Seconds named `_s` are those in which the process could act: time for which it was stopped (SIGSTOP) is not in them.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """Example: Doing(text="training step 12", since=1732212000.1, for_s=3.2, deadline_s=3600.0)"""

    text: str
    since: float
    """Unix seconds, for people."""
    for_s: float
    """Since it began, or got further (`activity.beat`)."""
    deadline_s: float | None = None


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Example: Wait(owner="orchestrator", reason="batch 13", since=1732212000.1, waited_s=3.2, deadline_s=3600.0)"""

    owner: str
    """Who ends it: a process, or several by the beginning of their names (`is_of`); or what is none, like a disk."""
    reason: str
    since: float
    """Unix seconds, for people."""
    waited_s: float
    deadline_s: float | None = None

    @property
    def is_overdue(self) -> bool:
        return self.deadline_s is not None and self.waited_s >= self.deadline_s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself."""

    process: str
    token: str
    """Its pid and start time, see `lifeline.token_of`: another process of the same pid has another one."""
    host: str
    time: float
    """Unix seconds of this report."""
    beat: float
    """The same on the clock that nobody sets (`time.monotonic`), which all processes of a machine share."""
    age_s: float
    """Since it began."""
    doing: tuple[Doing, ...] = ()
    """In the order in which it began."""
    waits: tuple[Wait, ...] = ()
    """The longest first."""
    got_on_s: float | None = None
    """Since what it is at got further last (`activity.beat`); None where it has not said so yet."""
    loop_s: float | None = None
    """Since its event loop had a turn; None for a process without one."""
    engine_s: float | None = None
    """Since its engine took a step, or had nothing to do; None for a process without one."""
    children: dict[str, str] = {}
    """Processes that it has started and watches, by name: their tokens."""
    ended: bool = False
    """It has ended in order, and this is the last report."""

    @property
    def pid(self) -> int:
        return int(self.token.partition(":")[0])


def is_of(process: str, owner: str) -> bool:
    """Whether `process` is one of those that `owner` names. Example: is_of("inference-1", "inference")"""
    return process == owner or process.startswith(f"{owner}-")


def write_report(directory: Path, report: Report) -> None:
    """Exchange the file whole; the directory is there. Raises: OSError."""
    temporary = directory / f".{report.process}.tmp.json"
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(_path(directory, report.process))


def touch_report(directory: Path, process: str) -> None:
    """Give a sign of life where there is no room for a report. Raises: OSError."""
    os.utime(_path(directory, process))


def read_reports(directory: Path) -> dict[str, Report]:
    """The reports in `directory` by process; a file that holds none is left out, and so is one that cannot be read."""
    reports = {}
    for path in sorted(directory.glob("[!.]*.json")):
        try:
            report = msgspec.json.decode(path.read_bytes(), type=Report)
        except (OSError, msgspec.MsgspecError):
            continue
        reports[report.process] = report
    return reports


def touched_at(directory: Path, process: str) -> int:
    """When the file was written or touched last, in nanoseconds since the epoch; 0 where there is none."""
    try:
        return _path(directory, process).stat().st_mtime_ns
    except OSError:
        return 0


def _path(directory: Path, process: str) -> Path:
    return directory / f"{process}.json"
