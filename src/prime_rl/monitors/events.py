"""What happened in a run besides its steps, such as a server that was lost: one JSON object a line, both ends.

`{"time": 1732212000.123, "event": "inference server http://localhost:8001/v1 is lost: ..."}`
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from prime_rl.disk import LooseFile


class EventLog:
    """Appends events. Several processes may write to one file; what the disk refuses is dropped."""

    def __init__(self, file: LooseFile) -> None:
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[EventLog]:
        """The log at `path`, for the duration of the block."""
        with closing(LooseFile(path)) as file:
            yield cls(file)

    def write(self, event: str) -> None:
        self._file.append((json.dumps({"time": round(time.time(), 3), "event": event}) + "\n").encode())


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
