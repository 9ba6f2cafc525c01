"""Where a run begins: anew, at the checkpoint that the user has chosen, or at the newest that there is.

anew       step 0, the model directory; a run directory that holds a run is refused before
resume     ckpt.resume_step: that checkpoint; what lies beyond it is set aside (`prime_rl.resume`)
recover    the newest sound one of recovery/ and checkpoints/, or step 0; nothing is set aside but rows of metrics,
           and batches that are there are trained on again. Where the run was resumed, none older than that of
           ckpt.resume_step (with skip_progress, that of the resume where there is no other); at that one, what the
           resume skips is skipped again
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prime_rl.config.artifacts import TrainerCheckpointConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ArtifactError
from prime_rl.journal import Journal
from prime_rl.logs import get_logger
from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import drop_rows, go_back, sources
from prime_rl.trainer.chance import set_chance
from prime_rl.trainer.checkpoints.keeper import Progress
from prime_rl.trainer.ckpt import Record, Stateful, load_state, read_record
from prime_rl.trainer.model.build import TrainedModel
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.streams import Seekable
from prime_rl.transport.checkpoints import TRAINER_STATE, choose, complete_checkpoints, newest_sound, step_of
from prime_rl.transport.manifest import complete_steps, remove_dir

_logger = get_logger(__name__)

Kind = Literal["anew", "resume", "recover"]


def kind_of(config: TrainerConfig | SFTConfig) -> Kind:
    """How a configuration wants to begin; a run that is recovered may have been resumed before."""
    if isinstance(config, TrainerConfig) and config.recover:
        return "recover"
    return "resume" if config.ckpt is not None and config.ckpt.resume_step is not None else "anew"


def checkpoint_root(config: TrainerConfig | SFTConfig) -> Path:
    """Where the checkpoints of a run are; of a replay always in its own directory, for others' are not its to touch."""
    own = RunPaths(config.output_dir).checkpoints
    return own if _is_replay(config) else _source_root(config)


def _source_root(config: TrainerConfig | SFTConfig) -> Path:
    """Where the checkpoints are that a run may be resumed from; a replay reads those of the run that recorded."""
    chosen = config.ckpt.output_dir if config.ckpt is not None else None
    return chosen or RunPaths(config.output_dir).checkpoints


def _is_replay(config: TrainerConfig | SFTConfig) -> bool:
    return isinstance(config, TrainerConfig) and config.replay is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins, the same on all ranks."""

    kind: Kind
    checkpoint: Path | None = None
    """None: the model directory, at step 0."""
    record: Record | None = None
    skip: TrainerCheckpointConfig | None = None
    """What of the checkpoint is not taken; None: all is."""

    @property
    def first_step(self) -> int:
        """The first batch."""
        is_counted_anew = self.skip is not None and self.skip.skip_progress
        return 0 if self.record is None or is_counted_anew else self.record.step

    @property
    def skips_anything(self) -> bool:
        """Whether the run goes on with another state than that of its checkpoint."""
        skip = self.skip
        return skip is not None and any(
            (skip.skip_progress, skip.skip_scheduler, skip.skip_optimizer, skip.skip_dataloader)
        )

    def progress(self) -> Progress:
        """The counts that the run goes on with."""
        record, skip = self.record, self.skip
        if record is None:
            return Progress()
        schedule_step = 0 if skip is not None and skip.skip_scheduler else record.schedule_step
        ahead = schedule_step - self.first_step
        if skip is not None and skip.skip_progress:
            return Progress(schedule_ahead=ahead)
        return Progress(
            tokens=record.total_tokens,
            samples=record.total_samples,
            schedule_ahead=ahead,
            num_skipped=record.num_skipped,
        )


def choose_start(config: TrainerConfig | SFTConfig, ranks: Ranks) -> Start:
    """All ranks at once; rank 0 chooses, which reads the whole checkpoint.

    Raises: ArtifactError where there is none to resume from, it is damaged, or holds weights alone.
    """
    kind = kind_of(config)
    chosen = ranks.told("choosing where to begin", lambda: _chosen(config, kind))
    if chosen is None:
        return Start(kind=kind)
    checkpoint, is_skipping = chosen
    record = read_record(checkpoint / TRAINER_STATE)
    if not record.has_optimizer:
        raise ArtifactError(
            f"{checkpoint} holds weights alone (ckpt.weights_only), from which no run can be resumed; begin a new run "
            f"with model.name = {step_dir(RunPaths(config.output_dir).weights, record.step)}, or resume from another"
        )
    return Start(kind=kind, checkpoint=checkpoint, record=record, skip=config.ckpt if is_skipping else None)


def _chosen(config: TrainerConfig | SFTConfig, kind: Kind) -> tuple[Path, bool] | None:
    """Rank 0's: the checkpoint, and whether it is the one that the user has chosen, of which some may be skipped."""
    paths, ckpt = RunPaths(config.output_dir), config.ckpt
    counts_anew = ckpt is not None and ckpt.skip_progress
    step = _resumed_from(config) if kind == "recover" else None if ckpt is None else ckpt.resume_step
    if kind == "recover":
        root, has_all = checkpoint_root(config), ckpt is None or not ckpt.weights_only
        newest = newest_sound([paths.recovery, root] if has_all else [paths.recovery])
        if newest is not None and (step is None or counts_anew or step_of(newest) >= step):
            return newest, not counts_anew and step_of(newest) == step
    if step is None:
        return None
    return choose(sources(paths, _source_root(config), step, counts_anew=counts_anew), step), True


def _resumed_from(config: TrainerConfig | SFTConfig) -> int | None:
    """The checkpoint that a run which recovers was resumed from; None: it was not, or which one is not said."""
    ckpt = config.ckpt
    if ckpt is None or ckpt.resume_step is None:
        return None
    return ckpt.resume_step if ckpt.resume_step >= 0 or ckpt.skip_progress else None


def load_start(start: Start, *, model: TrainedModel, optimizer: Stateful, data: Seekable | None, ranks: Ranks) -> None:
    """Put the checkpoint into model, optimizer, data and generators. All ranks at once.

    Raises: ArtifactError where it is of another model or optimizer, DataError where it is of other data.
    """
    if start.checkpoint is None or start.record is None:
        return
    skip, record = start.skip, start.record
    with_optimizer = skip is None or not skip.skip_optimizer
    load_state(start.checkpoint / TRAINER_STATE, model, optimizer if with_optimizer else None, ranks.control)
    if data is not None and record.data is not None and not (skip is not None and skip.skip_dataloader):
        data.seek(record.data)
    if ranks.rank < len(record.chance):
        set_chance(record.chance[ranks.rank], ranks.device)


def clear_way(config: TrainerConfig | SFTConfig, start: Start, journal: Journal, *, recorded: Path | None) -> None:
    """Rank 0's, after loading: make room for what the run is to write, and note where it begins.

    `recorded`: where batches lie. Raises: ArtifactError where the disk refuses, or batches to train on again are gone.
    """
    if start.kind == "anew":
        return
    paths, root, step = RunPaths(config.output_dir), checkpoint_root(config), start.first_step
    if start.kind == "resume":
        assert start.record is not None
        counts_anew = config.ckpt is not None and config.ckpt.skip_progress
        aside = go_back(paths, start.record.step, owns=("trainer",), checkpoints=root, counts_anew=counts_anew)
        if aside is not None:
            _logger.info("What lay beyond step %d of this run is in %s", step, aside)
    else:
        if recorded is not None:
            _check_batches(recorded, step)
        if config.ckpt is not None and config.ckpt.weights_only:
            _remove_later(root, step)
        else:
            _set_damaged_aside(root, step)
        _set_damaged_aside(paths.recovery, step)
        drop_rows(paths.metrics("trainer"), step)
    journal.note("went_back", step=step)
    source = "" if start.checkpoint is None else str(start.checkpoint)
    journal.note("resumed", step=step, kind=start.kind, checkpoint=source)
    how = "Resuming" if start.kind == "resume" else "Going on"
    _logger.info("%s with batch %d from %s", how, step, start.checkpoint or "the model directory: no checkpoint yet")


def _check_batches(recorded: Path, step: int) -> None:
    """Those that only an older checkpoint needs are gone, and nobody makes them again."""
    steps = complete_steps(recorded)
    if steps and step < steps[0]:
        raise ArtifactError(
            f"the newest checkpoint that is whole is that of step {step}, and the batches since then are gone: the "
            f"oldest in {recorded} is {steps[0]}; go back to that checkpoint with ckpt.resume_step = {step}, or begin "
            "again with --clean"
        )


def _remove_later(root: Path, step: int) -> None:
    """Weights alone, sound or not, from which nobody goes on: they are written again."""
    for later in complete_checkpoints(root):
        if later > step:
            remove_dir(step_dir(root, later))


def _set_damaged_aside(root: Path, step: int) -> None:
    """Those that were passed over are written again, for which their names must be free.

    Of those that were damaged earlier nothing stays, or they would fill the disk.
    """
    for earlier in root.glob("step_*.damaged-*") if any(n > step for n in complete_checkpoints(root)) else ():
        remove_dir(earlier)
    for later in complete_checkpoints(root):
        if later > step:
            damaged = step_dir(root, later)
            number = next(n for n in range(1, 10_000) if not damaged.with_name(f"{damaged.name}.damaged-{n}").exists())
            try:
                damaged.rename(damaged.with_name(f"{damaged.name}.damaged-{number}"))
            except OSError as error:
                raise ArtifactError(f"{damaged} is damaged and cannot be renamed: {error}") from error


def earlier_checkpoints(config: TrainerConfig | SFTConfig) -> str | None:
    """What to say where a new run would begin in the directory of another; None where it would not."""
    root = checkpoint_root(config)
    if steps := complete_checkpoints(root):
        return (
            f"{root} holds checkpoints of an earlier run (up to step {steps[-1]}); go on from the "
            "latest with ckpt.resume_step = -1, or choose another output_dir"
        )
    return None
