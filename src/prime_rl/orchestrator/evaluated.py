"""What was evaluated during training when a process ended, and what it was at: read from what it left behind.

A row of metrics is the last thing that an evaluation writes, so what has one is evaluated, and nothing else is. The
journal tells which evaluation had begun.
"""

from __future__ import annotations

import sys
from typing import Final

from prime_rl.errors import DataError
from prime_rl.journal import read_journal
from prime_rl.logs import get_logger
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.resume import set_rows_aside

PROCESS: Final = "orchestrator"
"""As the journal names this process."""
BEGUN: Final = "evaluation_begun"
COMPLETE: Final = "evaluation_complete"
RECOVERED: Final = "recovered"

_logger = get_logger(__name__)


def evaluated_versions(paths: RunPaths, *, before: int | None = None) -> dict[str, int]:
    """By kind, the version that was evaluated last. Waits for the disk.

    `before`: forget those from this one on, whose rows are set aside.
    """
    path = paths.metrics("eval")
    set_rows_aside(paths, "eval", sys.maxsize if before is None else before)
    versions: dict[str, int] = {}
    for row in read_metrics(path):
        for kind in {name.partition("/")[0] for name in row} & {"eval", "val"}:
            versions[kind] = max(versions.get(kind, -1), int(row["step"] or 0))
    return versions


def cut_off(paths: RunPaths) -> dict[str, int]:
    """By kind, the version whose evaluation had begun and was not complete when the process ended."""
    open_: dict[str, int] = {}
    try:
        entries = read_journal(paths.journal)
    except DataError as error:
        _logger.warning("What was evaluated when the run was ended is not known: %s", error)
        return {}
    for entry in entries:
        if entry.process != PROCESS or entry.step is None:
            continue
        kind = str(entry.facts.get("kind", ""))
        if entry.event == BEGUN:
            open_[kind] = entry.step
        elif entry.event == COMPLETE:
            open_.pop(kind, None)
        elif entry.event == RECOVERED and entry.facts.get("how") == "resumed":
            open_.clear()  # the run went back to an earlier step
    return open_
