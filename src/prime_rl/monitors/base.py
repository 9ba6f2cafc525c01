"""Where metrics go: a protocol, the JSONL file that is always written, and a fan-out over several monitors.

A metric is a float under a name like `reward/mean`; a row is all metrics of one step of one process.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from prime_rl.disk import LooseFile

MetricsRow = dict[str, float | None]
"""As it is in a file: null where it was not finite."""


class Monitor(Protocol):
    """Takes one row of metrics a step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record `metrics` of `step`."""

    def close(self) -> None:
        """Flush and release what the monitor holds."""


class JsonlMonitor:
    """Appends one JSON object a step: `{"step": 3, "time": <unix seconds>, "reward/mean": 0.41, ...}`.

    A row reaches the file in one write, so a reader sees whole lines only. NaN and infinities become null: JSON has
    no word for them, and a file that standard readers refuse helps nobody. A row that the disk refuses is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._file = LooseFile(path)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "time": round(time.time(), 3), **finite}
        self._file.append((json.dumps(row) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class FanOut:
    """One monitor that passes every row on to several."""

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self._monitors = list(monitors)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for monitor in self._monitors:
            monitor.log(metrics, step=step)

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close()


class FakeMonitor:
    """Keeps the rows in memory, for tests."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class MetricsTail:
    """The rows of a metrics file that grows: each line is read once. A file that was exchanged is read anew."""

    def __init__(self, path: Path, keep: Callable[[MetricsRow], MetricsRow] = lambda row: row) -> None:
        """`keep`: what is kept of a row. All of it, a hundred names and numbers, takes 20 KB."""
        self._path = path
        self._keep = keep
        self._inode = 0
        self._offset = 0
        self._rows: list[MetricsRow] = []

    def read(self) -> list[MetricsRow]:
        """All rows so far; a last line that is still being written is left out, and one that is damaged. No file: no
        rows."""
        if self._path.exists():
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._rows = found.st_ino, 0, []
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self._rows += [self._keep(row) for line in whole.splitlines() if (row := _row(line)) is not None]
        return self._rows


def _row(line: bytes) -> MetricsRow | None:
    """None: it is damaged, of which `prime_rl.resume.drop_rows` tells; whoever only looks at rows does without it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_metrics(path: Path) -> list[MetricsRow]:
    """The rows of a metrics file, read once."""
    return MetricsTail(path).read()
