"""What happened in a run besides its steps, such as a server that was lost: one JSON object a line, both ends.

`{"time": 1732212000.123, "event": "inference server http://localhost:8001/v1 is lost: ..."}`
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class EventLog:
    """Appends events. Several processes may write to one file: a line reaches it in one write."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[EventLog]:
        """The log at `path`, for the duration of the block."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            yield cls(file)

    def write(self, event: str) -> None:
        self._file.write((json.dumps({"time": round(time.time(), 3), "event": event}) + "\n").encode())


class EventTail:
    """The events of a file that grows: each is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[str]:
        """The events since the last call; a last line that is still being written is left out. No file: none."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line)["event"] for line in whole.splitlines()]
