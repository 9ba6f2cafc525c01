"""Logging: one line an event, to the terminal and to the process's own file.

    12:34:56 INFO  trainer       | Step 3 | Time: 1.20s | Loss: 0.0123 | ...

Warnings of Python's `warnings` module are logged too. Third-party loggers speak from WARNING up.
"""

import json
import logging
import sys
from io import TextIOWrapper
from pathlib import Path

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


class _File(logging.FileHandler):
    """Appends to a file, which is made with its directory at the first record.

    A rank that has nothing to say leaves no file, and none in a run directory that the first rank is still cleaning.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8", delay=True)

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


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
