"""Which weights are published after a step, and which older ones nobody can need any more."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prime_rl.logs import get_logger
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import MARKER, complete_steps, read_manifest, remove_dir

_logger = get_logger(__name__)


def removable(steps: list[int], *, latest: int, keep_last: int, interval: int | None) -> list[int]:
    """Of the published `steps`, those outside the last `keep_last` that are no multiple of `interval`.

    Example: removable([1, 2, 3, 4, 5], latest=5, keep_last=2, interval=2) == [1, 3]
    """
    old = [step for step in steps if step <= latest - keep_last]
    return [step for step in old if interval is None or step % interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideCheckpoints:
    """Weights that a run needs which goes on from checkpoint x: those of x, and of up to `level` steps before."""

    level: int
    """How many steps generation may run ahead."""
    is_planned: Callable[[int], bool]
    """Whether a step is to have a checkpoint."""
    steps: Callable[[], Collection[int]]
    """Of the checkpoints that there are, or are being written."""

    def is_beside_planned(self, step: int) -> bool:
        """Whether a checkpoint is to come to which the weights of `step` belong."""
        return any(self.is_planned(later) for later in range(step, step + self.level + 1))

    def needed(self) -> set[int]:
        """Which weights belong to the checkpoints that there are."""
        return {step for later in self.steps() for step in range(later - self.level, later + 1)}


NO_CHECKPOINTS: Final = BesideCheckpoints(level=0, is_planned=lambda step: False, steps=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which steps are published under `root`, and which stay.

    For RL (`keep_last` set) every step is published, because inference waits for it, and older ones are
    removed. For SFT (`keep_last` None) only those are that stay: multiples of `interval`, the last step, and those of
    checkpoints, which go with them.
    """

    root: Path
    max_steps: int | None
    interval: int | None
    keep_last: int | None
    beside: BesideCheckpoints = NO_CHECKPOINTS
    published_before: int = 0
    """Up to this step weights were published before the run was begun again: what is gone of them, but for the newest,
    is not needed."""

    def is_last(self, step: int) -> bool:
        """Whether training ends with this step."""
        return step == self.max_steps

    def stays(self, step: int) -> bool:
        """Whether the weights of this step are to stay on disk."""
        is_on_interval = self.interval is not None and step % self.interval == 0
        return self.is_last(step) or is_on_interval or self.beside.is_beside_planned(step)

    def is_wanted(self, step: int) -> bool:
        """Whether they are published at all."""
        return self.keep_last is not None or self.stays(step)

    def remove_old(self, latest: int) -> None:
        """Remove what nobody can need any more once `latest` is published."""
        if self.keep_last is None and self.beside is NO_CHECKPOINTS:
            return
        needed = self.beside.needed()
        steps = complete_steps(self.root)
        for step in removable(steps, latest=latest, keep_last=self.keep_last or 1, interval=self.interval):
            if step not in needed:
                remove_dir(step_dir(self.root, step))

    def tidy(self) -> None:
        """Remove what nobody can need any more once the run is complete, and all of it published."""
        self.remove_old(max(complete_steps(self.root), default=0))

    def is_published(self, step: int) -> bool:
        """Whether these weights need not be written. Of the newest, one that is gone was lost with the machine."""
        is_among_newest = self.keep_last is not None and step > self.published_before - self.keep_last
        return step <= self.published_before and (self.is_there(step) or not is_among_newest)

    def is_there(self, step: int) -> bool:
        """Whether the weights of this step are on disk."""
        return (step_dir(self.root, step) / MARKER).is_file()


def tell_difference(root: Path, step: int, digest: str) -> None:
    """Warn where the published weights of `step` are not those with this digest, which were trained again.

    Raises: ArtifactError where their marker is damaged.
    """
    published = read_manifest(step_dir(root, step)).weights
    if published is not None and published.digest != digest:
        _logger.warning(
            "Training step %d again gave other weights than those in %s, which stay: on this machine the same training "
            "does not give the same to the last bit",
            step - 1,
            step_dir(root, step),
        )
