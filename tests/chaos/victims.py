"""The processes of a run, found from its launcher."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import psutil

from prime_rl import activity, lifeline
from tests.chaos.phases import Phase, Victim

WORKER: Final = "prime_rl.environments.worker"
COMMAND: Final = "prime_rl.cli"


def find(launcher: psutil.Process, victim: Victim, phase: Phase) -> psutil.Process | None:
    """A process of the kind `victim` that runs; None where there is none just now.

    While the run is evaluated, the worker is one of the evaluation.
    """
    with contextlib.suppress(psutil.Error):
        if victim is Victim.LAUNCHER:
            return launcher if launcher.is_running() else None
        parent = _child(launcher, victim.process)
        if parent is None or victim in (Victim.INFERENCE, Victim.ORCHESTRATOR):
            return parent
        if victim is Victim.ENV_WORKER:
            return next(_workers(parent, of_evaluation=phase is Phase.EVALUATING), None)
        return _rank(parent, 0 if victim is Victim.TRAINER else 1)
    return None


def name_of(process: psutil.Process) -> str | None:
    """Which part of a run a process is, by its command line; None for one that only helps another."""
    words = process.cmdline()
    if WORKER in words:
        return "eval worker" if _is_of_evaluation(process) else "env worker"
    if COMMAND not in words:
        return None
    name = words[words.index(COMMAND) + 1]
    rank = process.environ().get("RANK")
    if words[:1] and "prime_rl.trainer.agent" in words:
        return f"{name} agent"
    return name if rank is None else f"{name} rank {rank}"


def left_over(launchers: Collection[int]) -> list[psutil.Process]:
    """Processes that were started, at whatever distance, by launchers of these pids."""
    found = []
    for process in psutil.process_iter():
        try:
            token = process.environ().get(lifeline.VARIABLE, "")
            is_dead = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if not is_dead and token and int(token.partition(":")[0]) in launchers:
            found.append(process)
    return found


def named(launcher: psutil.Process, name: str) -> psutil.Process | None:
    """The process that the launcher's plan calls so (`inference-1`, `teacher`); of several ranks, their agent."""
    with contextlib.suppress(psutil.Error):
        return next((child for child in launcher.children() if _name_in_plan(child) == name), None)
    return None


def _child(launcher: psutil.Process, name: str) -> psutil.Process | None:
    """As `named`; of several servers any one."""
    for child in launcher.children():
        if _name_in_plan(child).partition("-")[0] == name:
            return child
    return None


def _name_in_plan(process: psutil.Process) -> str:
    return process.environ().get(activity.NAME, "")


def _workers(orchestrator: psutil.Process, *, of_evaluation: bool) -> Iterator[psutil.Process]:
    for child in orchestrator.children():
        with contextlib.suppress(psutil.Error, OSError):
            if WORKER in child.cmdline() and _is_of_evaluation(child) == of_evaluation:
                yield child


def _is_of_evaluation(worker: psutil.Process) -> bool:
    """By its log, which is `logs/envs/eval/<environment>-N.log`."""
    return Path(os.readlink(f"/proc/{worker.pid}/fd/1")).parent.name == "eval"


def _rank(trainer: psutil.Process, rank: int) -> psutil.Process | None:
    """One of the ranks that an agent has started; without an agent the trainer is rank 0."""
    if "prime_rl.trainer.agent" not in trainer.cmdline():
        return trainer if rank == 0 else None
    for child in trainer.children():
        with contextlib.suppress(psutil.Error):
            if COMMAND in child.cmdline() and child.environ().get("RANK") == str(rank):
                return child
    return None
