"""Whose deadline has passed: what the launcher asks at every tick, from the reports in `activity/`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from prime_rl import activity
from prime_rl.activity.causes import Hang, HangWatch
from prime_rl.activity.files import read_reports, touched_at

INTERVAL_S: Final = 1.0


class Hangs:
    """To be asked a few times a second; looks once a second."""

    def __init__(self, directory: Path, hang_timeout_s: float) -> None:
        """`directory`: `activity` of the run, in which this process reports, too."""
        self._directory = directory
        self._watch = HangWatch(hang_timeout_s)
        self._next_look = 0.0

    def overdue(self, running: Mapping[str, int]) -> list[Hang]:
        """`running`: the processes that run now and report, by name, with their pids.

        A wait past its deadline is told of once; a process that hangs, too, until it is started again, which its new
        pid says.
        """
        now = activity.clock()
        if now < self._next_look:
            return []
        self._next_look = now + INTERVAL_S
        reports = read_reports(self._directory)
        signs = {name: (report.beat, touched_at(self._directory, name)) for name, report in reports.items()}
        return self._watch.look(running, reports, signs, now)
