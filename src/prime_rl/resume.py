"""Going back to an earlier step of a run: what lies beyond it is set aside, and nothing is deleted.

Checkpoint N is the state after N steps, so the next batch is N. Beyond it are batches from N on, and weights,
checkpoints and evaluations from N + 1 on; they go to `superseded/K/`, in the layout of the run directory.
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from prime_rl.errors import ArtifactError, DataError
from prime_rl.paths import RunPaths, step_dir


@dataclass(frozen=True, slots=True)
class _Kept:
    """Directories `<root>/step_N` of which one process is the owner; those from `first` on are set aside."""

    owner: str
    root: Path
    first: int


def go_back(
    paths: RunPaths, step: int, *, owns: Collection[str] = ("trainer", "orchestrator"), checkpoints: Path | None = None
) -> Path | None:
    """Set aside what lies beyond checkpoint `step` and belongs to the processes `owns`; where to, if there was any.

    `checkpoints`: where the checkpoints are, if not in the run directory; theirs stay on that file system, in a
    `superseded` of their own.

    A launcher that is killed in the middle leaves a run that can go on from its newest checkpoint, or back again: what
    is newest goes first, checkpoints before weights before batches, each with one rename.
    Raises: ArtifactError where the disk refuses; DataError where a file of metrics is damaged.
    """
    root = checkpoints or paths.checkpoints
    kept = [
        _Kept("trainer", root, step + 1),
        _Kept("trainer", paths.recovery, step + 1),
        _Kept("trainer", paths.weights, step + 1),
        _Kept("trainer", paths.merged, step + 1),
        _Kept("orchestrator", paths.rollouts, step),
        _Kept("orchestrator", paths.traces, step),
        _Kept("orchestrator", paths.evals, step + 1),
    ]
    aside = _next_number(paths.superseded)
    moved = False
    try:
        for one in kept:
            inside = one.root.is_relative_to(paths.output_dir)
            target = aside / one.root.relative_to(paths.output_dir) if inside else _next_number(root / "superseded")
            for found in _beyond(one) if one.owner in owns else ():
                target.mkdir(parents=True, exist_ok=True)
                step_dir(one.root, found).rename(step_dir(target, found))
                moved = moved or inside
        for process in sorted(owns):
            path = paths.metrics(process)
            moved |= drop_rows(path, step, aside=aside / path.relative_to(paths.output_dir))
    except OSError as error:
        raise ArtifactError(f"cannot set aside what lies beyond step {step} in {paths.output_dir}: {error}") from error
    return aside if moved else None


def drop_rows(path: Path, step: int, *, aside: Path | None = None) -> bool:
    """Take the rows of `step` and later out of a file of metrics, to `aside` where that is given; whether there were.

    The file is exchanged whole. A last row that its writer did not finish goes.
    Raises: DataError naming a row that is damaged; OSError where the disk refuses.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return False
    is_beyond = [_step_of(line, path, number) >= step for number, line in enumerate(lines, 1)]
    beyond = [line for line, is_late in zip(lines, is_beyond, strict=True) if is_late]
    if not beyond and not torn:
        return False
    if beyond and aside is not None:
        _write(aside, beyond)
    _write(path, [line for line, is_late in zip(lines, is_beyond, strict=True) if not is_late])
    return bool(beyond)


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"row {number} of {path} is damaged: {error!r}; delete that row to go on without it") from error


def _write(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _beyond(kept: _Kept) -> Iterator[int]:
    """Steps that are set aside, the newest first."""
    names = [entry.name.removeprefix("step_") for entry in kept.root.glob("step_*")]
    yield from sorted((int(name) for name in names if name.isdecimal() and int(name) >= kept.first), reverse=True)


def _next_number(root: Path) -> Path:
    """The first `<root>/K` behind those that are there."""
    taken = [int(entry.name) for entry in root.glob("[0-9]*") if entry.name.isdecimal()]
    return root / str(max(taken, default=0) + 1)
