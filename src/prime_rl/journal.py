"""What changed what is trained, in the order in which it happened: one JSON object a line, both ends.

    {"time": 1732212000.123, "process": "trainer", "event": "batch_consumed", "step": 3, "digest": "9f..."}

    process        events ("_begun": an intent, by which a reader knows what somebody was at when it died)
    launcher       run_started (attempt, pid), process_started (name, pid, started), process_ended (name, how),
                   restart (name, number, reason), run_stopped (reason), run_complete
    orchestrator   batch_begun, batch_complete (digest), evaluation_begun, evaluation_complete, recovered
    trainer        batch_received, batch_consumed (digest), weights_begun, weights_published (digest),
                   checkpoint_begun (kind), checkpoint_complete (kind), went_back, resumed

Several processes append to one file. A line reaches it in one write; a process that was killed in the middle of that,
or whose disk was full, leaves a torn line, which the next writer closes with `TORN`, so that no other line is harmed.
"""

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from prime_rl.disk import refusal
from prime_rl.errors import DataError
from prime_rl.logs import get_logger

Fact = str | int | float

TORN: Final = b"~"
"""The last byte of a line that its writer did not finish. No whole line ends so: it ends with a brace."""

_logger = get_logger(__name__)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line.

    Example: Entry(time=1732212000.123, process="trainer", event="batch_consumed", step=3, facts={"digest": "9f..."})
    """

    time: float
    """Seconds since the epoch, for people: a clock that is set changes no order."""
    process: str
    event: str
    step: int | None = None
    facts: dict[str, Fact] = {}


class Journal:
    """Appends the events of one process. Nothing is open in between, so that it can be thrown away."""

    def __init__(self, path: Path, process: str) -> None:
        self._path = path
        self._process = process
        self._num_missing = 0
        """Events in a row that could not be noted."""

    def note(self, event: str, *, step: int | None = None, **facts: Fact) -> None:
        """Write down that `event` has happened, on disk when this returns.

        Where it cannot be written (a full disk), that is a warning, the first time: a run that can go on does so.
        """
        entry = {"time": round(time.time(), 3), "process": self._process, "event": event}
        line = msgspec.json.encode(entry | ({} if step is None else {"step": step}) | facts) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self._num_missing += 1
            if self._num_missing == 1:
                _logger.warning("%s: %s cannot be noted: %s", self._path, event, refusal(error, self._path))
            return
        if self._num_missing:
            _logger.warning("%s: events are noted again; %d are missing", self._path, self._num_missing)
            self._num_missing = 0

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = TORN + b"\n" + line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)


def read_journal(path: Path) -> list[Entry]:
    """All entries so far, in order. Torn lines are left out. No file: none.

    Raises: DataError naming a line that is damaged otherwise.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # behind the last newline: a line that is being written, or torn
    except FileNotFoundError:
        return []
    return [_entry(line, path, number) for number, line in enumerate(lines, 1) if not line.endswith(TORN)]


def _entry(line: bytes, path: Path, number: int) -> Entry:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Fact])
        own = {name: fields.pop(name) for name in Entry.__struct_fields__ if name in fields}
        return msgspec.convert(own | {"facts": fields}, Entry)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"line {number} of {path} is damaged: {error}; delete that line to go on without what it told"
        ) from error


def history(entries: Iterable[Entry]) -> list[Entry]:
    """The batches that the newest weights were made of: `batch_consumed`, without those that training went back behind.

    In a sound run its steps are 0, 1, ..., each once.
    """
    consumed: list[Entry] = []
    for entry in entries:
        if entry.event == "batch_consumed":
            consumed.append(entry)
        elif entry.event == "went_back" and entry.step is not None:
            start = entry.step
            consumed = [one for one in consumed if one.step is not None and one.step < start]
    return consumed
