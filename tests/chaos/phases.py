"""What a run is at, as its journal tells: the phases in which something is killed, and when each is open.

    phase            begins with                       ends with
    starting         process_started (its own)         the first word of that process; of one that has none, of a batch
    generating       batch_complete (n)                batch_begun (n + 1)
    writing a batch  batch_begun (n)                   batch_complete (n)
    training         batch_received (n)                batch_consumed (n)
    publishing       weights_begun (n)                 weights_published (n)
    checkpointing    checkpoint_begun (n)              checkpoint_complete (n)
    evaluating       evaluation_begun (n)              evaluation_complete (n)

A phase also ends when the process that is at it is started anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from prime_rl.journal import Entry


class Victim(StrEnum):
    """A kind of process."""

    LAUNCHER = "launcher"
    INFERENCE = "inference"
    ORCHESTRATOR = "orchestrator"
    ENV_WORKER = "env worker"
    TRAINER = "trainer rank 0"
    """The only one, or the first of several."""
    RANK_1 = "trainer rank 1"

    @property
    def process(self) -> str:
        """The process of the launcher's plan that it is, or of which it is a part."""
        return _PROCESS[self]


class Phase(StrEnum):
    STARTING = "starting"
    GENERATING = "generating"
    WRITING = "writing a batch"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"


_PROCESS: Final = {
    Victim.LAUNCHER: "launcher",
    Victim.INFERENCE: "inference",
    Victim.ORCHESTRATOR: "orchestrator",
    Victim.ENV_WORKER: "orchestrator",
    Victim.TRAINER: "trainer",
    Victim.RANK_1: "trainer",
}
_BOUNDS: Final = {
    Phase.GENERATING: ("batch_complete", "batch_begun"),
    Phase.WRITING: ("batch_begun", "batch_complete"),
    Phase.TRAINING: ("batch_received", "batch_consumed"),
    Phase.PUBLISHING: ("weights_begun", "weights_published"),
    Phase.CHECKPOINTING: ("checkpoint_begun", "checkpoint_complete"),
    Phase.EVALUATING: ("evaluation_begun", "evaluation_complete"),
}
_OWNER: Final = {
    Phase.GENERATING: "orchestrator",
    Phase.WRITING: "orchestrator",
    Phase.TRAINING: "trainer",
    Phase.PUBLISHING: "trainer",
    Phase.CHECKPOINTING: "trainer",
    Phase.EVALUATING: "orchestrator",
}


def opened(entries: Sequence[Entry], phase: Phase, victim: Victim, *, max_steps: int) -> Entry | None:
    """The entry with which the newest `phase` began that has not ended; None where there is none.

    `victim` tells whose start it is, in the phase of starting. Nothing is generated behind the last batch.
    """
    if phase is Phase.STARTING:
        return _starting(entries, victim)
    begin, end = _BOUNDS[phase]
    found: dict[int | None, Entry] = {}
    for entry in entries:
        if entry.event == begin:
            found[entry.step] = entry
        elif entry.event == end:
            found.pop(_step_ended(entry, phase), None)
        elif _is_new(entry, _OWNER[phase]):
            found.clear()
    if phase is Phase.GENERATING:
        found.pop(max_steps - 1, None)
    return list(found.values())[-1] if found else None


def _step_ended(entry: Entry, phase: Phase) -> int | None:
    return entry.step - 1 if phase is Phase.GENERATING and entry.step is not None else entry.step


def _starting(entries: Sequence[Entry], victim: Victim) -> Entry | None:
    """Servers and launcher say nothing that tells of their work: they are there once a batch is."""
    begun: Entry | None = None
    for entry in entries:
        if _is_new(entry, victim.process):
            begun = entry
        elif entry.event == "batch_begun" or (entry.process == victim.process and victim is not Victim.LAUNCHER):
            begun = None
    return begun


def _is_new(entry: Entry, process: str) -> bool:
    """Whether `entry` tells of a start of `process`."""
    if process == "launcher":
        return entry.event == "run_started"
    return entry.event == "process_started" and entry.facts.get("name") == process
