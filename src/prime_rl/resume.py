"""Going back to an earlier step of a run: what lies beyond it is set aside, and nothing is deleted.

Of a root that lies elsewhere (`ckpt.output_dir`, a link to another disk) it stays there, in `<root>/superseded/K/`.

Checkpoint N is the state after N steps, so the next batch is N. Beyond it are batches from N on, and weights,
checkpoints and evaluations from N + 1 on; they go to `superseded/K/`, in the layout of the run directory. A run that
counts its steps from 0 again has use for nothing that has a number, so all of it goes there, the checkpoint last.
"""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger
from prime_rl.paths import RunPaths, step_dir

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Directories `<root>/step_N` of which one process is the owner; those from `first` on are set aside."""

    owner: str
    root: Path
    first: int


def go_back(
    paths: RunPaths,
    step: int,
    *,
    owns: Collection[str] = ("trainer", "orchestrator"),
    checkpoints: Path | None = None,
    counts_anew: bool = False,
) -> Path | None:
    """Set aside what lies beyond checkpoint `step` and belongs to the processes `owns`; where to, if there was any.

    `checkpoints`: where the checkpoints are, if not in the run directory. `counts_anew`: what lies before is set aside,
    too (`ckpt.skip_progress`).

    A launcher that is killed in the middle leaves a run that can go on from its newest checkpoint, or back again: what
    is newest goes first, checkpoints before weights before batches, each with one rename; what lies before goes in the
    order of steps, so that the checkpoint itself is the last. Where it is then, `sources` knows.
    Raises: ArtifactError where the disk refuses.
    """
    root = checkpoints or paths.checkpoints
    kept = _owned(paths, root, step, owns)
    number = max(_numbers(paths, [one.root for one in kept]), default=0) + 1
    moved = False
    try:
        for one, found in _leaving(kept, counts_anew=counts_anew):
            target = _aside(paths, one.root, number)
            target.mkdir(parents=True, exist_ok=True)
            step_dir(one.root, found).rename(step_dir(target, found))
            moved = moved or target.is_relative_to(paths.superseded)
        firsts = dict.fromkeys(sorted(owns), step) | ({"eval": step + 1} if "orchestrator" in owns else {})
        for process, first in firsts.items():
            path = paths.metrics(process)
            moved |= drop_rows(path, 0 if counts_anew else first, aside=_rows_aside(paths, path, number))
    except OSError as error:
        raise ArtifactError(f"cannot set aside what lies beyond step {step} in {paths.output_dir}: {error}") from error
    return paths.superseded / str(number) if moved else None


def sources(paths: RunPaths, checkpoints: Path | None, step: int, *, counts_anew: bool = False) -> list[Path]:
    """The roots from which checkpoint `step` (-1: the latest) is to be chosen, for a run that is resumed.

    One that counts its steps anew finds it where `go_back` has set it aside, perhaps for another process, or for a
    launcher that was killed.
    """
    root = checkpoints or paths.checkpoints
    here = [root, paths.recovery]
    numbers = sorted(_numbers(paths, here), reverse=True) if counts_anew else []
    places = [here, *([_aside(paths, one, number) for one in here] for number in numbers)]
    return next((roots for roots in places if _holds(roots, step)), here)


def _holds(roots: Sequence[Path], step: int) -> bool:
    there = [found for root in roots for found in _steps(root)]
    return step in there or (step < 0 and bool(there))


def _owned(paths: RunPaths, checkpoints: Path, step: int, owns: Collection[str]) -> list[_Kept]:
    kept = [
        _Kept("trainer", checkpoints, step + 1),
        _Kept("trainer", paths.recovery, step + 1),
        _Kept("trainer", paths.weights, step + 1),
        _Kept("trainer", paths.merged, step + 1),
        _Kept("orchestrator", paths.rollouts, step),
        _Kept("orchestrator", paths.traces, step),
        _Kept("orchestrator", paths.evals, step + 1),
    ]
    return [one for one in kept if one.owner in owns]


def _leaving(kept: Sequence[_Kept], *, counts_anew: bool) -> list[tuple[_Kept, int]]:
    """Which step of which root is set aside, in the order in which they are."""
    there = [(one, _steps(one.root)) for one in kept]
    leaving = [(one, step) for one, steps in there for step in reversed(steps) if step >= one.first]
    if counts_anew:
        before = [(one, step) for one, steps in reversed(there) for step in steps if step < one.first]
        leaving += sorted(before, key=lambda found: found[1])
    return leaving


def set_rows_aside(paths: RunPaths, process: str, step: int) -> None:
    """Take the rows of `step` and later out of the metrics of `process`, which come again, to a `superseded/K` of
    their own. Raises: OSError where the disk refuses."""
    path, number = paths.metrics(process), max(_numbers(paths, []), default=0) + 1
    drop_rows(path, step, aside=_rows_aside(paths, path, number))


def drop_rows(path: Path, step: int, *, aside: Path | None = None) -> bool:
    """Take the rows of `step` and later out of a file of metrics, to `aside` where that is given; whether there were.

    The file is exchanged whole. A last row that its writer did not finish goes. A damaged one is moved to a file beside
    it with a warning: a run can do without.
    Raises: OSError where the disk refuses.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return False
    steps = [_step_of(line) for line in lines]
    beyond = [line for line, of in zip(lines, steps, strict=True) if of is not None and of >= step]
    damaged = [line for line, of in zip(lines, steps, strict=True) if of is None]
    if not beyond and not damaged and not torn:
        return False
    if beyond and aside is not None:
        _write(aside, beyond)
    if damaged:
        beside = path.with_name(f"{path.name}.damaged")
        _logger.warning("Row %d of %s is damaged; such rows are in %s now", steps.index(None) + 1, path, beside)
        _write(beside, [*(beside.read_bytes().splitlines() if beside.exists() else []), *damaged])
    _write(path, [line for line, of in zip(lines, steps, strict=True) if of is not None and of < step])
    return bool(beyond)


def _step_of(line: bytes) -> int | None:
    """None: the row is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # that of whoever was killed here is written over
    with temporary.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _steps(root: Path) -> list[int]:
    """Of the directories that are there, complete or not, ascending."""
    names = [entry.name.removeprefix("step_") for entry in root.glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())


def _aside(paths: RunPaths, root: Path, number: int) -> Path:
    """Where the directories that are set aside of `root` go, each with one rename: so on the disk on which they are."""
    is_here = root.is_relative_to(paths.output_dir) and root.resolve().is_relative_to(paths.output_dir.resolve())
    return _rows_aside(paths, root, number) if is_here else root / "superseded" / str(number)


def _rows_aside(paths: RunPaths, path: Path, number: int) -> Path:
    """`path` of the run directory in the layout of what is set aside."""
    return paths.superseded / str(number) / path.relative_to(paths.output_dir)


def _numbers(paths: RunPaths, roots: Iterable[Path]) -> set[int]:
    """K of all `superseded/K` that there are, of the run directory and of `roots` that lie elsewhere."""
    places = (paths.superseded, *(root / "superseded" for root in roots))
    return {int(entry.name) for place in places for entry in place.glob("[0-9]*") if entry.name.isdecimal()}
