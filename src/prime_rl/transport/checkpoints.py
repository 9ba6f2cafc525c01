"""Checkpoints on disk, as all processes see them: which there are, and which one a run goes on from. No torch.

`<root>/step_N/` is the run after N optimizer steps, so it goes on with batch N. `root` is `checkpoints/`, or
`recovery/` with the rolling one of a supervised run. Each is a directory of `transport.manifest`: complete or not
there, and every file with its digest. The trainer writes all of it, `trainer.ckpt` says how.

    trainer/                      the trainer's own state
    orchestrator/state.msgpack    the orchestrator's, right after batch N - 1 was taken; absent where there was none
    STABLE                        the marker
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prime_rl.errors import ArtifactError, Unreadable
from prime_rl.logs import get_logger
from prime_rl.paths import step_dir
from prime_rl.transport import manifest
from prime_rl.transport.manifest import STEP_NAME, complete_steps, put_back, read_manifest, remove_dir

TRAINER_STATE: Final = "trainer"
ORCHESTRATOR_STATE: Final = "orchestrator/state.msgpack"
LATEST: Final = -1
"""Instead of a step: the latest complete one."""

_logger = get_logger(__name__)


def complete_checkpoints(root: Path) -> list[int]:
    """Steps with a complete checkpoint under `root`, ascending; empty when `root` does not exist."""
    return complete_steps(root)


def step_of(checkpoint: Path) -> int:
    """N of `.../step_N`."""
    match = STEP_NAME.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not named step_N"
    return int(match[1])


def verify(directory: Path) -> None:
    """Check every file of a checkpoint. Raises: ArtifactError naming the damaged or missing one."""
    manifest.verify(directory)


def choose(roots: Sequence[Path], step: int) -> Path:
    """The checkpoint of `step`, or with LATEST the latest complete one; of two of one step, that of the earlier root.

    Raises: ArtifactError where there is none, naming those that there are; where it is damaged, naming the file and
    offering the one before; Unreadable where it cannot be read now.
    """
    found = _newest_first(roots)
    candidates = [path for path in found if step == LATEST or step_of(path) == step]
    if not candidates:
        steps = sorted({step_of(path) for path in found})
        there = f"complete are: {', '.join(map(str, steps))}" if steps else "there is no complete one"
        what = "no checkpoint" if step == LATEST else f"no complete checkpoint of step {step}"
        raise ArtifactError(f"{what} in {' or '.join(map(str, roots))} to resume from; {there}")
    newest = step_of(candidates[0])
    errors = []
    for path in candidates:
        if step_of(path) != newest:
            break
        try:
            verify(path)
        except Unreadable:
            raise
        except ArtifactError as error:
            errors.append(error)
        else:
            return path
    raise ArtifactError(f"the checkpoint of step {newest} cannot be used: {errors[0]}; {_offer(found, newest)}")


def newest_sound(roots: Sequence[Path]) -> Path | None:
    """The newest complete and undamaged checkpoint, of two of one step that of the earlier root. None: there is none.

    A damaged one is passed over with a warning. Raises: Unreadable where one cannot be read now.
    """
    for path in _newest_first(roots):
        try:
            verify(path)
        except Unreadable:
            raise
        except ArtifactError as error:
            _logger.warning("The checkpoint %s is passed over: %s", path, error)
        else:
            return path
    return None


def remove_lost(root: Path) -> list[int]:
    """The machine went down: remove what was not forced to disk under `root` and did not get there; the steps of it.

    `root`: of weights, where nobody writes or reads now. Raises: Unreadable where one cannot be read now.
    """
    lost = []
    for final in root.glob("step_*"):
        if (match := STEP_NAME.fullmatch(final.name)) is None:
            continue
        try:
            if not read_manifest(final).durable:
                verify(final)
        except Unreadable:
            raise
        except ArtifactError:
            remove_dir(final)
            lost.append(int(match[1]))
    return sorted(lost)


def _offer(found: Sequence[Path], damaged: int) -> str:
    """What to do instead: the newest sound one before."""
    for path in found:
        if step_of(path) < damaged:
            try:
                verify(path)
            except Unreadable as error:
                return f"of the one before it nobody can tell: {error}"
            except ArtifactError:
                continue
            return f"the one before it is whole: resume with ckpt.resume_step = {step_of(path)}"
    return "there is none before it that is whole, so the run must begin again, in another directory or with --clean"


def _newest_first(roots: Sequence[Path]) -> list[Path]:
    for root in roots:
        put_back(root)
    paths = [step_dir(root, step) for root in roots for step in complete_checkpoints(root)]
    return sorted(paths, key=step_of, reverse=True)
