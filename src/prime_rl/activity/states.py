"""How processes are, seen from outside: what their reports say, and what the system says of their pids."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

from prime_rl import lifeline
from prime_rl.activity.files import Report, touched_at

SILENT_S: Final = 10.0
"""Without a report for longer, though they come every second, a process is silent."""


class Condition(StrEnum):
    ALIVE = "alive"
    STARTING = "starting"
    """It runs, and has not reported yet."""
    STOPPED = "stopped"
    """By SIGSTOP, or a debugger. SIGCONT lets it go on."""
    SILENT = "silent"
    """It runs, and does not report, or its event loop stands still."""
    STUCK = "stuck"
    """It answers, and its engine takes no step with requests in it."""
    GONE = "gone"
    """It was killed, or died."""
    ENDED = "ended"
    """In order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a process is."""

    condition: Condition
    since_s: float | None = None
    """Seconds for which it has been stopped, silent, stuck or gone, as far as that is known."""
    pid: int | None = None

    @property
    def trouble(self) -> str:
        """What is wrong with it, in words; "" where nothing is."""
        if self.condition in (Condition.ALIVE, Condition.STARTING, Condition.ENDED):
            return ""
        since = "" if self.since_s is None else f" since {self.since_s:.0f} s"
        if self.condition is Condition.STUCK:
            return f"has an engine that takes no step{since}"
        return f"is {self.condition}{since}"


def state_of(report: Report, directory: Path) -> State:
    """How the process is that wrote `report` in `directory`. That of another machine is judged by its reports alone."""
    silent_s = max(0.0, min(time.time() - report.time, time.time() - touched_at(directory, report.process) / 1e9))
    if report.ended:
        return State(condition=Condition.ENDED, pid=report.pid)
    if report.host == socket.gethostname():
        silent_s = max(0.0, min(time.monotonic() - report.beat, silent_s))
        condition = condition_of(report.token)
        if condition is not Condition.ALIVE:
            return State(condition=condition, since_s=silent_s, pid=report.pid)
    stands_s = 0.0 if report.loop_s is None else report.loop_s
    if max(silent_s, stands_s) > SILENT_S:
        return State(condition=Condition.SILENT, since_s=max(silent_s, stands_s), pid=report.pid)
    if report.engine_s is not None and report.engine_s > SILENT_S:
        return State(condition=Condition.STUCK, since_s=report.engine_s, pid=report.pid)
    return State(condition=Condition.ALIVE, pid=report.pid)


def condition_of(token: str) -> Condition:
    """Whether a process of this machine is alive, stopped or gone."""
    if not lifeline.is_alive(token):
        return Condition.GONE
    try:
        status = psutil.Process(int(token.partition(":")[0])).status()
    except psutil.NoSuchProcess:
        return Condition.GONE
    is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return Condition.STOPPED if is_stopped else Condition.ALIVE


def children_of(report: Report) -> dict[str, State]:
    """How the processes are that this one has started: those that it names, and others that are stopped."""
    if report.host != socket.gethostname() or condition_of(report.token) is Condition.GONE:
        return {}
    found = {
        name: State(condition=condition_of(token), pid=int(token.partition(":")[0]))
        for name, token in report.children.items()
    }
    known = {state.pid for state in found.values()}
    try:
        descendants = psutil.Process(report.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for process in descendants:
        token = lifeline.token_of(process.pid)
        if process.pid not in known and token is not None and condition_of(token) is Condition.STOPPED:
            found[f"child {process.pid}"] = State(condition=Condition.STOPPED, pid=process.pid)
    return found


def all_states(reports: Mapping[str, Report], directory: Path) -> dict[str, State]:
    """How all processes are, by name; what others have started is named `<process>'s <child>` where it is in trouble,
    and as the launcher names it where it has not reported yet."""
    states = {name: state_of(report, directory) for name, report in reports.items()}
    own = {state.pid for state in states.values()}
    for name, report in reports.items():
        for child, state in children_of(report).items():
            if state.pid in own:
                continue
            reported = states.get(child)
            if name == "launcher" and (reported is None or reported.condition is Condition.GONE) and not state.trouble:
                states[child] = State(condition=Condition.STARTING, pid=state.pid)
            elif state.trouble:
                states[f"{name}'s {child}"] = state
    return states
