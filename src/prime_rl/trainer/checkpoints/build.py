"""From a configuration to the Keeper of a trainer, and to what its weights on disk have to do with checkpoints."""

import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from prime_rl import activity
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.journal import Journal
from prime_rl.paths import RunPaths, step_dir
from prime_rl.trainer.checkpoints.keeper import CheckpointKeeper, CheckpointPlan, Sources
from prime_rl.trainer.checkpoints.retention import CheckpointRetention
from prime_rl.trainer.checkpoints.start import Start, checkpoint_root, kind_of
from prime_rl.trainer.checkpoints.writer import CheckpointWriter
from prime_rl.trainer.ckpt import Stateful, import_saving, state_of
from prime_rl.trainer.model.build import TrainedModel
from prime_rl.trainer.publish.retention import BesideCheckpoints, Retention
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.streams import Seekable
from prime_rl.transport.batches import read_state
from prime_rl.transport.manifest import MARKER, latest_step, remove_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The rules of one run, which its keeper and its publisher share."""

    plan: CheckpointPlan
    checkpoints: CheckpointRetention
    weights: Retention
    recorded: Path | None
    """Where batches lie, beside the orchestrator's state; None where there are none."""

    def tidy(self) -> None:
        """Rank 0's, once the last step is made and all of it written: remove what only a recovery would have needed."""
        # Under a launcher the others may still be at work: it says when the run is complete, or to have more steps.
        self.checkpoints.finish(is_complete=activity.SUPERVISED not in os.environ)
        self.weights.tidy()


def build_rules(
    config: TrainerConfig | SFTConfig,
    *,
    max_steps: int | None,
    keep_last: int | None,
    level: int,
    recorded: Path | None,
) -> Kept:
    """`keep_last`: see Retention. `level`: how many steps generation may run ahead. `recorded`: see Kept."""
    paths, ckpt = RunPaths(config.output_dir), config.ckpt
    is_rl = isinstance(config, TrainerConfig)
    is_whole = ckpt is None or not ckpt.weights_only
    plan = CheckpointPlan(
        is_on=ckpt is not None,
        interval=None if ckpt is None else ckpt.interval,
        max_steps=max_steps,
        is_async=ckpt is not None and ckpt.save_async,
        weights_only=not is_whole,
        recovery_interval_s=config.recovery_interval if isinstance(config, TrainerConfig) else None,
        is_recovered=kind_of(config) == "recover",
    )
    drops_batches = isinstance(config, TrainerConfig) and not config.keep_batches and config.replay is None
    checkpoints = CheckpointRetention(
        checkpoints=checkpoint_root(config),
        recovery=paths.recovery,
        keep_last=None if ckpt is None else ckpt.keep_last,
        keep_interval=None if ckpt is None else ckpt.keep_interval,
        batches=recorded if drops_batches else None,
        is_whole=is_whole,
    )
    weights = Retention(
        root=paths.weights,
        max_steps=None if config.bench else max_steps,  # the last step of a benchmark is like the others
        interval=config.weights.interval,
        keep_last=keep_last,
        beside=BesideCheckpoints(level=level if is_rl else 0, is_planned=plan.has, steps=checkpoints.steps),
        published_before=latest_step(paths.weights) or 0,
    )
    return Kept(plan=plan, checkpoints=checkpoints, weights=weights, recorded=recorded)


def build_keeper(
    kept: Kept,
    *,
    start: Start,
    journal: Journal,
    model: TrainedModel,
    optimizer: Stateful,
    data: Seekable | None,
    ranks: Ranks,
    stack: ExitStack,
) -> CheckpointKeeper:
    """On every rank, after the checkpoint of `start` was loaded. What is opened is closed by `stack`."""
    plan = kept.plan
    if ranks.is_leader:
        for root in (kept.checkpoints.checkpoints, kept.checkpoints.recovery):
            remove_drafts(root)
    writer = stack.enter_context(closing(CheckpointWriter(ranks)))
    if plan.is_on or plan.recovery_interval_s is not None:
        import_saving()
    if (plan.is_on and plan.is_async) or plan.recovery_interval_s is not None:
        writer.prepare(state_of(model, optimizer))
    return CheckpointKeeper(
        plan=plan,
        writer=writer,
        retention=kept.checkpoints,
        journal=journal,
        ranks=ranks,
        progress=start.progress(),
        sources=Sources(
            state=lambda with_optimizer: state_of(model, optimizer if with_optimizer else None),
            position=None if data is None else data.position,
            orchestrator=lambda step: _orchestrator_state(kept.recorded, step),
        ),
        tidy=kept.tidy,
    )


def _orchestrator_state(recorded: Path | None, step: int) -> bytes | None:
    """The orchestrator's after batch `step`, where that was written down."""
    if recorded is None or not (step_dir(recorded, step) / MARKER).is_file():
        return None
    return read_state(step_dir(recorded, step))
