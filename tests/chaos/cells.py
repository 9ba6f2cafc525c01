"""The matrix: kinds of processes by phases, the runs in which they are killed, and the table of what came of it.

python -m tests.chaos.cells DIRECTORY        of runs that are over
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.kills import Ended, Kill
from tests.chaos.phases import Phase, Victim

STEPS_PER_KILL: Final = 5
"""Steps that a run has for each kill: one that is trained before, and a few phases that may be missed."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """A kind of run."""

    flags: tuple[str, ...]
    victims: tuple[Victim, ...]
    phases: tuple[Phase, ...]


_EVALUATED: Final = (
    *("--orchestrator.eval.interval", "1", "--orchestrator.eval.num-examples", "2"),
    *("--orchestrator.eval.rollouts-per-example", "1", "--orchestrator.eval.sampling.max-tokens", "8"),
)
_ALONE: Final = (Victim.LAUNCHER, Victim.INFERENCE, Victim.ORCHESTRATOR, Victim.ENV_WORKER, Victim.TRAINER)
_TWO_RANKS: Final = ("--trainer-gpu-ids", "0,1", "--trainer.device", "cpu")

FLAVOURS: Final[Mapping[str, Flavour]] = {
    # No [ckpt]: only the recovery checkpoint, here every second. Nothing is evaluated.
    "recovery": Flavour(
        flags=("--recovery-interval", "1"),
        victims=_ALONE,
        phases=tuple(phase for phase in Phase if phase is not Phase.EVALUATING),
    ),
    # A checkpoint after every step, and weights that may be two steps old.
    "checkpoints": Flavour(
        flags=("--ckpt.interval", "1", "--ckpt.keep-last", "2", "--max-async-level", "2", *_EVALUATED),
        victims=_ALONE,
        phases=tuple(Phase),
    ),
    # A trainer of two ranks. The other kinds of processes have the same to do as with one.
    "ranks": Flavour(
        flags=(*_TWO_RANKS, "--ckpt.interval", "2", "--ckpt.keep-last", "1", *_EVALUATED),
        victims=(Victim.TRAINER, Victim.RANK_1, Victim.LAUNCHER),
        phases=tuple(Phase),
    ),
}
"""Every kind of process is there in every phase of some flavour, so every cell of the matrix is meaningful. Not so in
each flavour: a trainer of one process has no rank 1, and a run without `orchestrator.eval` does not evaluate."""

RUNS: Final = [(name, phase) for name, flavour in FLAVOURS.items() for phase in flavour.phases]


def kills_of(name: str, phase: Phase) -> list[Kill]:
    """What is killed in one run of the matrix, one after the other."""
    return [Kill(victim, phase) for victim in FLAVOURS[name].victims]


def max_steps_of(name: str, phase: Phase) -> int:
    return STEPS_PER_KILL * len(kills_of(name, phase)) + 1


@dataclass(frozen=True, slots=True)
class Result:
    """A run of the matrix that is over."""

    name: str
    phase: Phase
    ended: Ended
    complaint: str = ""
    """What does not hold for it."""


def table(results: Iterable[Result]) -> str:
    """Of each cell the kills that were fired in its phase and, of these, those in runs that recovered."""
    fired: Counter[Kill] = Counter()
    recovered: Counter[Kill] = Counter()
    missed = 0
    for result in results:
        for shot in result.ended.shots:
            if not shot.counts:
                missed += 1
                continue
            fired[shot.kill] += 1
            recovered[shot.kill] += not result.complaint
    head = " ".join(f"{phase:>15}" for phase in Phase)
    lines = [f"{'kills / recovered':17} {head}"]
    for victim in Victim:
        cells = [Kill(victim, phase) for phase in Phase]
        said = " ".join(f"{f'{fired[cell]} / {recovered[cell]}':>15}" for cell in cells)
        lines.append(f"{victim:17} {said}")
    lines.append(
        f"{fired.total()} kills in their phase, after which {recovered.total()} times everything held; {missed} more "
        "kills hit when the phase had ended"
    )
    return "\n".join(lines)


def never_fired(results: Iterable[Result]) -> list[Kill]:
    """Cells of the matrix in which nothing was killed."""
    fired = {shot.kill for result in results for shot in result.ended.shots if shot.counts}
    return [cell for victim in Victim for phase in Phase if (cell := Kill(victim, phase)) not in fired]


def read(root: Path) -> list[Result]:
    """The results of the runs in a directory; they are called FLAVOUR-PHASE."""
    found = []
    for name, phase in RUNS:
        directory = root / place(name, phase)
        if (directory / "kills.json").exists():
            complaint = directory / "complaint.txt"
            said = complaint.read_text() if complaint.exists() else ""
            found.append(Result(name, phase, Ended.read(directory), said))
    return found


def place(name: str, phase: Phase) -> str:
    """The directory of a run of the matrix."""
    return f"{name}-{phase.replace(' ', '-')}"


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
