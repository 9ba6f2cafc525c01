"""Which checkpoints, and which recorded batches, stay on disk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.paths import step_dir
from prime_rl.transport.batches import recorded_steps, remove_batch
from prime_rl.transport.checkpoints import complete_checkpoints
from prime_rl.transport.manifest import remove_dir


def removable_checkpoints(steps: Sequence[int], *, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Of the complete checkpoints, ascending, those that go. The newest one never does.

    Example: removable_checkpoints([10, 20, 30, 40, 50], keep_last=2, keep_interval=20) == [10, 30]
    """
    if keep_last is None and keep_interval is None:
        return []
    old = steps[: -(keep_last or 1)]
    return [step for step in old if keep_interval is None or step % keep_interval]


@dataclass(slots=True, kw_only=True)
class CheckpointRetention:
    """Applied by rank 0 after every checkpoint."""

    checkpoints: Path
    recovery: Path
    keep_last: int | None
    keep_interval: int | None
    batches: Path | None
    """Where batches are recorded, of which the old ones go. None: none of them do."""
    is_whole: bool
    """Whether a run can go on from `checkpoints`; from weights alone it cannot."""
    begun: int | None = None
    """The step of the checkpoint that is being written, or was last."""
    is_over: bool = False
    """Whether the last step is made, and all of it written: nobody samples from older weights any more, not even
    where there are more steps to come and training goes on from the recovery checkpoint."""

    def steps(self) -> set[int]:
        """Of the checkpoints beside which weights are needed; also that of the one that is being written."""
        begun = set() if self.begun is None else {self.begun}
        rolling = set() if self.is_over else {*complete_checkpoints(self.recovery), *begun}
        return rolling | {*complete_checkpoints(self.checkpoints)}

    def apply(self) -> None:
        """Remove what nobody can go on from, or needs to, any more. What cannot be removed is a warning."""
        complete = complete_checkpoints(self.checkpoints)
        gone = removable_checkpoints(complete, keep_last=self.keep_last, keep_interval=self.keep_interval)
        _remove(self.checkpoints, gone)
        rolling = complete_checkpoints(self.recovery)
        _remove(self.recovery, rolling[:-1])
        if self.batches is not None:
            # Of either kind the newest: should one of them be damaged, the run goes on from the other.
            kinds = [steps[-1] for steps in (complete if self.is_whole else [], rolling) if steps]
            needed = min(kinds, default=0)
            for step in recorded_steps(self.batches):
                if step < needed - 1:  # that of `needed - 1` has the orchestrator's state at the checkpoint
                    remove_batch(step_dir(self.batches, step))

    def finish(self, *, is_complete: bool) -> None:
        """The last step is made. `is_complete`: with it, the run is, so that nothing is to be recovered."""
        self.is_over = True
        if is_complete:
            _remove(self.recovery, complete_checkpoints(self.recovery))


def _remove(root: Path, steps: Iterable[int]) -> None:
    for step in steps:
        remove_dir(step_dir(root, step))
