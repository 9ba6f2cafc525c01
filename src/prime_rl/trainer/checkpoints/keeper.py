"""What the training loop leaves behind of every step, besides weights and metrics: the journal, and checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from prime_rl.data.samples import TrainingBatch
from prime_rl.journal import Journal
from prime_rl.paths import step_dir
from prime_rl.trainer.chance import chance_now
from prime_rl.trainer.checkpoints.retention import CheckpointRetention
from prime_rl.trainer.checkpoints.writer import CheckpointWriter, Contents
from prime_rl.trainer.ckpt import Record, State
from prime_rl.trainer.ranks import Ranks
from prime_rl.transport.batches import digest_of


class Keeper(Protocol):
    """What the loop calls, on all ranks at once where nothing else is said."""

    def wants_recovery(self) -> bool:
        """Rank 0's, before a step: whether a recovery checkpoint is to follow it."""

    def received(self, step: int) -> None:
        """Batch `step` is there."""

    def before_update(self) -> None:
        """Weights and optimizer state are about to change."""

    def consumed(self, batch: TrainingBatch) -> dict[str, float]:
        """They have; metrics of the run so far."""

    def step_done(self, step: int, *, is_recovery_due: bool, num_skipped: int) -> bool:
        """`step` steps are made, their weights published, if they are wanted; whether there is a checkpoint of them.

        Raises: ArtifactError where a checkpoint cannot be written.
        """

    def finish(self) -> None:
        """The run is complete. Raises: as `step_done`."""


class KeepsNothing:
    """Of a training loop by itself."""

    def wants_recovery(self) -> bool:
        return False

    def received(self, step: int) -> None:
        pass

    def before_update(self) -> None:
        pass

    def consumed(self, batch: TrainingBatch) -> dict[str, float]:
        return {}

    def step_done(self, step: int, *, is_recovery_due: bool, num_skipped: int) -> bool:
        return False

    def finish(self) -> None:
        pass


KEEPS_NOTHING: Final = KeepsNothing()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Which steps have a checkpoint, and what kind of one."""

    is_on: bool
    """Whether there are any, besides those for recovery."""
    interval: int | None
    max_steps: int | None
    is_async: bool
    weights_only: bool
    recovery_interval_s: float | None
    is_recovered: bool = False
    """Whether the first step is to have a recovery checkpoint: a run that dies more often than the interval is long
    would otherwise make the same steps again every time."""

    def has(self, step: int) -> bool:
        """Whether step `step` has one, the last one always."""
        is_on_interval = self.interval is not None and step % self.interval == 0
        return self.is_on and (step == self.max_steps or is_on_interval)


@dataclass(slots=True, kw_only=True)
class Progress:
    """What was trained on so far, and where the learning-rate schedule is."""

    tokens: int = 0
    samples: int = 0
    schedule_ahead: int = 0
    """Steps by which the schedule is ahead of the count of steps; below 0: behind it."""
    num_skipped: int = 0
    """Of the last steps, in a row, those whose update was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What there is to save, as it is at the time of the call."""

    state: Callable[[bool], State]
    """The tensors, with the optimizer's or without."""
    position: Callable[[], bytes] | None
    """Of the data."""
    orchestrator: Callable[[int], bytes | None]
    """Its state after a batch."""


class CheckpointKeeper:
    """The one of `trainer` and `sft`."""

    def __init__(
        self,
        *,
        plan: CheckpointPlan,
        writer: CheckpointWriter,
        retention: CheckpointRetention,
        journal: Journal,
        ranks: Ranks,
        progress: Progress,
        sources: Sources,
        tidy: Callable[[], None],
    ) -> None:
        """`tidy`: removes what only a recovery would have needed, once the last step is made and all is written."""
        self._plan = plan
        self._writer = writer
        self._retention = retention
        self._journal = journal
        self._ranks = ranks
        self._progress = progress
        self._sources = sources
        self._tidy = tidy
        self._last_whole = -math.inf if plan.is_recovered else time.monotonic()

    def wants_recovery(self) -> bool:
        interval = self._plan.recovery_interval_s
        is_due = interval is not None and time.monotonic() - self._last_whole >= interval
        return is_due and not self._writer.is_busy

    def received(self, step: int) -> None:
        self._note("batch_received", step)

    def before_update(self) -> None:
        self._writer.wait_copied()

    def consumed(self, batch: TrainingBatch) -> dict[str, float]:
        self._progress.tokens += batch.num_tokens
        self._progress.samples += batch.num_sequences
        if self._ranks.is_leader:
            self._journal.note("batch_consumed", step=batch.step, digest=digest_of(batch))
        return {"progress/total_tokens": self._progress.tokens, "progress/total_samples": self._progress.samples}

    def step_done(self, step: int, *, is_recovery_due: bool, num_skipped: int) -> bool:
        self._writer.check()
        self._progress.num_skipped = num_skipped
        is_planned, is_whole = self._plan.has(step), not self._plan.weights_only
        if is_planned:
            self._save(step, self._retention.checkpoints, "checkpoint", with_optimizer=is_whole)
        is_recovered_from = is_recovery_due and step != self._plan.max_steps and not (is_planned and is_whole)
        if is_recovered_from:
            self.save_recovery(step)
        return is_planned or is_recovered_from

    def save_recovery(self, step: int) -> None:
        """Write a recovery checkpoint, in the background. All ranks at once. Raises: as `step_done`."""
        self._save(step, self._retention.recovery, "recovery", with_optimizer=True)

    def finish(self) -> None:
        self._writer.finish()
        if self._ranks.is_leader:
            self._tidy()

    def _save(self, step: int, root: Path, kind: str, *, with_optimizer: bool) -> None:
        progress, sources = self._progress, self._sources
        record = Record(
            step=step,
            schedule_step=step + progress.schedule_ahead,
            total_tokens=progress.tokens,
            total_samples=progress.samples,
            num_skipped=progress.num_skipped,
            has_optimizer=with_optimizer,
            chance=self._ranks.gathered(chance_now(self._ranks.device)),
            data=None if sources.position is None else sources.position(),
        )
        self._writer.finish()  # before the next one counts as begun
        self._retention.begun = step
        if with_optimizer:
            self._last_whole = time.monotonic()

        def complete() -> None:
            self._note("checkpoint_complete", step, kind=kind)
            self._retention.apply()

        contents = Contents(
            final=step_dir(root, step),
            record=record,
            orchestrator=lambda: sources.orchestrator(step - 1),
            begun=lambda: self._note("checkpoint_begun", step, kind=kind),
            complete=complete,
            replaces=kind == "recovery",  # the one that was resumed from, without what was skipped
        )
        self._writer.save(
            sources.state(with_optimizer), contents, in_background=self._plan.is_async or kind == "recovery"
        )

    def _note(self, event: str, step: int, **facts: str) -> None:
        if self._ranks.is_leader:
            self._journal.note(event, step=step, **facts)
