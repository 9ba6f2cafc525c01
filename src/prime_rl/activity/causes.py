"""Who holds up whom, from the reports of all processes: the chain of waits, and who hangs. Pure.

trainer --waits for batch 8--> orchestrator --waits for rollouts--> inference: stopped. It is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prime_rl.activity.files import Report, Wait, is_of

LAUNCHER: Final = "launcher"
CURRENT_S: Final = 10.0
"""A launcher that could not write its own report for longer takes no others' silence for a hang."""
BETWEEN_S: Final = 60.0
"""For so long a process may be between two things that have deadlines, such as two waits: it writes a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """From a process, over the waits that lead on, to the process at the end.

    Example: Chain(waits=(("trainer", wait_for_batch), ("orchestrator", wait_for_rollouts)), end="inference")
    """

    waits: tuple[tuple[str, Wait], ...] = ()
    end: str
    """Something is wrong with this process. Else the owner of the last wait: one process or several; or what none of
    them is, like a disk, or a server that somebody else has started."""
    trouble: str = ""
    """What is wrong with the one at the end; "" where nothing is known to be."""


def chain(
    reports: Mapping[str, Report],
    start: str,
    trouble: Callable[[str], str],
    *,
    leads_on: Callable[[Wait], bool] = lambda wait: True,
) -> Chain:
    """The chain from `start` to a process with which something is wrong, in words, as `trouble` says of each.

    Where there is none: the one that its longest waits make. Processes that do the same work stand for each other.
    """
    chains = list(_chains(reports, start, trouble, leads_on, frozenset()))
    return next((one for one in chains if one.trouble), chains[0])


def _chains(
    reports: Mapping[str, Report],
    owner: str,
    trouble: Callable[[str], str],
    leads_on: Callable[[Wait], bool],
    seen: frozenset[str],
) -> Iterator[Chain]:
    """All chains from here, depth first."""
    members = [name for name in reports if is_of(name, owner)] or [owner]
    for name in members:
        if why := trouble(name):
            yield Chain(end=name, trouble=why)
    for name in members:
        report = reports.get(name)
        for wait in report.waits if report is not None else ():
            if leads_on(wait) and wait.owner not in seen | {owner}:
                for rest in _chains(reports, wait.owner, trouble, leads_on, seen | {owner}):
                    yield Chain(waits=((name, wait), *rest.waits), end=rest.end, trouble=rest.trouble)
    yield Chain(end=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A deadline has passed."""

    culprit: str | None
    """The process that is to be started again; None where none of the run's is to blame."""
    reason: str
    """In words, beginning with a verb. Example: "has given no sign of life for 600 s"""


class HangWatch:
    """Looks at the reports again and again, and says whose deadline has passed. No I/O; its clock is the caller's.

    Silence is measured by the caller's clock, from when a report was first seen to stay as it is: whatever stops all
    processes of a machine stops this clock as well.
    """

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._pids: dict[str, int] = {}
        self._seen: dict[str, tuple[object, float]] = {}
        """By process: its last sign of life, and when that was first seen."""
        self._heard: set[str] = set()
        """Processes that have given a sign of life since they were started: what a report says is theirs."""
        self._told: set[tuple[str, str, float]] = set()
        """Waits that are overdue, and were told of."""
        self._busy: dict[str, tuple[str, float]] = {}
        """By process: its token, and when it was seen last to have time left for what it is at."""
        self._hung: set[str] = set()
        """Processes that were, and were not started again since."""

    def look(
        self, running: Mapping[str, int], reports: Mapping[str, Report], signs: Mapping[str, object], now: float
    ) -> list[Hang]:
        """`running`: the processes that shall report, by name, with their pids. `signs`: by process, what changes with
        every sign of life, the launcher's among them. `now`: seconds.

        A wait is told of once, unless it was renewed, and a process once, until its pid is another one.
        """
        for name, pid in running.items():
            if self._pids.get(name) != pid:  # it was started, or started again
                self._pids[name] = pid
                self._hung.discard(name)
                for known in {name, *(one for one in signs if is_of(one, name))}:
                    self._seen[known] = signs.get(known), now
                    self._heard.discard(known)
        for name, sign in signs.items():
            if self._seen.setdefault(name, (sign, now))[0] != sign:
                self._seen[name] = sign, now
                self._heard.add(name)
        if LAUNCHER not in self._seen or now - self._seen[LAUNCHER][1] > CURRENT_S:
            return []  # its disk takes no reports, so theirs tell nothing
        own = {name: report for name, report in reports.items() if _launched(name, running) and name in self._heard}
        own = {name: report for name, report in own.items() if not report.ended}
        found = [hang for name in [*own, *(set(running) - set(own))] if (hang := self._of(name, own, running, now))]
        found += self._of_waits(own, running, now)
        once = {hang.culprit: hang for hang in reversed(found) if hang.culprit and hang.culprit not in self._hung}
        self._hung.update(filter(None, once))
        return [*once.values(), *(hang for hang in found if hang.culprit is None)]

    def _of(self, name: str, reports: Mapping[str, Report], running: Mapping[str, int], now: float) -> Hang | None:
        culprit = _launched(name, running)
        which = "" if name == culprit else f"({name}) "
        silent_s = now - self._seen[name][1]
        if silent_s >= self._hang_timeout_s:
            return Hang(culprit=culprit, reason=f"{which}has given no sign of life for {silent_s:.0f} s")
        if (report := reports.get(name)) is None:
            return None
        if report.loop_s is not None and report.loop_s >= self._hang_timeout_s:
            return Hang(culprit=culprit, reason=f"{which}has an event loop that stands still for {report.loop_s:.0f} s")
        if report.engine_s is not None and report.engine_s >= self._hang_timeout_s:
            reason = f"{which}has an engine that has taken no step with requests in it for {report.engine_s:.0f} s"
            return Hang(culprit=culprit, reason=reason)
        for task in report.doing:
            if task.deadline_s is not None and task.for_s >= task.deadline_s:
                reason = f"{which}has been at the same for {task.for_s:.0f} s: {task.text}"
                return Hang(culprit=culprit, reason=reason)
        return None

    def _of_waits(self, reports: Mapping[str, Report], running: Mapping[str, int], now: float) -> Iterator[Hang]:
        """A wait that is overdue is the fault of whoever is at the end of such waits, unless that one has time left.

        It is looked at for as long as it is overdue: who has time left now may hang later."""
        overdue = set()
        for name, report in reports.items():
            for wait in report.waits:
                if not wait.is_overdue:
                    continue
                key = report.token, wait.owner, wait.since
                overdue.add(key)
                end = chain(reports, wait.owner, lambda name: "", leads_on=lambda one: one.is_overdue).end
                launched = [one for one in running if is_of(one, end)]
                judged = [one for one in launched if one in reports]  # others start, which has a limit of its own
                if launched and not judged:
                    continue
                culprits = [one for one in judged if self._is_to_blame(reports[one], wait, now)]
                for culprit in culprits:
                    waited = f"{wait.waited_s:.0f} s for {wait.reason}"
                    yield Hang(culprit=culprit, reason=f"has kept {name} waiting {waited}")
                if not culprits and key not in self._told:
                    reason = f"{name} has waited {wait.waited_s:.0f} s for {wait.reason} of {wait.owner}"
                    yield Hang(culprit=None, reason=reason)
                self._told.add(key)
        self._told &= overdue  # one that is renewed, or over, may be overdue anew

    def _is_to_blame(self, accused: Report, wait: Wait, now: float) -> bool:
        """Unless it has begun only lately, gets on, or is at something, or waits, with time left, or was just now."""
        limit_s = wait.deadline_s or 0.0
        if _is_busy(accused):
            self._busy[accused.process] = accused.token, now
        token, busy_at = self._busy.get(accused.process, ("", 0.0))
        was_busy = token == accused.token and now - busy_at < min(BETWEEN_S, limit_s)
        return accused.age_s >= limit_s and not was_busy and not self._gets_on(accused, wait)

    def _gets_on(self, accused: Report, wait: Wait) -> bool:
        """Whether it got further lately: then it works, and the deadline is too short, or another one is slow."""
        lately_s = min(self._hang_timeout_s, wait.deadline_s or 0.0)
        return accused.got_on_s is not None and accused.got_on_s < lately_s


def _is_busy(accused: Report) -> bool:
    """Whether it is at something, or waits for somebody, and has time left for that."""
    is_at_it = any(task.deadline_s is not None and task.for_s < task.deadline_s for task in accused.doing)
    return is_at_it or any(one.deadline_s is not None and not one.is_overdue for one in accused.waits)


def _launched(name: str, running: Mapping[str, int]) -> str | None:
    """Which of the launcher's processes it belongs to."""
    return max((one for one in running if is_of(name, one)), key=len, default=None)
