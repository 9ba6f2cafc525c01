"""Logging: one line an event, to the terminal and to the process's own file.

    12:34:56 INFO  trainer       | Step 3 | Time: 1.20s | Loss: 0.0123 | ...

Warnings of Python's `warnings` module are logged too. Third-party loggers speak from WARNING up.

What a full disk does not take of all that is dropped: it ends no run, and does not fill whatever else there is.
"""

import json
import logging
import os
import stat
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from prime_rl.disk import is_refusal, refusal

ROOT = "prime_rl"
FORMAT = "%(asctime)s %(levelname)-7s %(process_name)-12s | %(message)s"


class _ProcessName(logging.Filter):
    """Put the process's name on every record, whichever library made it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_name = self.process
        return True


class _JsonFormatter(logging.Formatter):
    """A line is a JSON object: time (seconds since the epoch), level, process, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": getattr(record, "process_name", ""),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Spare(FileIO):
    """A file of which nobody needs every byte: what the disk refuses is dropped."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if not is_refusal(error):
                raise
            self.refused(error)
            return memoryview(content).nbytes

    def refused(self, error: OSError) -> None:
        """Told of each."""


class _SpareLog(_Spare):
    """One that says so on standard error, once."""

    is_told = False

    def refused(self, error: OSError) -> None:
        if not self.is_told:
            self.is_told = True
            _tell_lost(str(self.name), error)


def _tell_lost(file: str, error: OSError) -> None:
    print(f"{file} is not written, and the run goes on: {refusal(error, file)}", file=sys.stderr)


def _as_text(file: FileIO) -> TextIOWrapper:
    return TextIOWrapper(BufferedWriter(file), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _File(logging.FileHandler):
    """Appends to a file, which is made with its directory at the first record.

    A rank that has nothing to say leaves no file, and none in a run directory that the first rank is still cleaning.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8", delay=True)
        self._is_told = False

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return _as_text(_SpareLog(self.baseFilename, "a"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:  # it cannot be opened; the next record tries again
            if not self._is_told:
                self._is_told = True
                _tell_lost(self.baseFilename, error)


def spare_streams() -> None:
    """Where standard output and error are files, as those of a process that was launched, let a full disk lose some
    of what is said there. Python would raise an error at whoever says it, and end with exit code 120."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        number = stream.fileno()
        if stat.S_ISREG(os.fstat(number).st_mode):
            stream.flush()
            setattr(sys, name, _as_text(_Spare(number, "w", closefd=False)))


def get_logger(name: str = ROOT) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(
    process: str,
    level: str = "info",
    file: Path | None = None,
    *,
    to_terminal: bool = True,
    as_json: bool = False,
) -> None:
    """Log everything of this process from `level` up, to standard error and (appending) to `file`.

    `as_json`: a line is a JSON object.
    """
    spare_streams()
    formatter = _JsonFormatter() if as_json else logging.Formatter(FORMAT, datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if to_terminal else []
    if file is not None:
        handlers.append(_File(file))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(_ProcessName(process))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    logging.captureWarnings(True)
