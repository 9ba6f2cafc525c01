"""From a configuration to a running Trainer: what RL and SFT assemble alike."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from prime_rl import activity
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.data.balance import CostModel
from prime_rl.data.rendering import load_tokenizer
from prime_rl.errors import ConfigError
from prime_rl.journal import Journal
from prime_rl.logs import get_logger
from prime_rl.models.hf import read_json
from prime_rl.monitors.base import FanOut, JsonlMonitor
from prime_rl.paths import RunPaths
from prime_rl.trainer.checkpoints.build import Kept, build_keeper, build_rules
from prime_rl.trainer.checkpoints.keeper import Keeper
from prime_rl.trainer.checkpoints.start import Start, choose_start, clear_way, load_start
from prime_rl.trainer.deterministic import make_deterministic
from prime_rl.trainer.model.build import TrainedModel, build_model
from prime_rl.trainer.optim.optimizer import Optimizer, build_optimizer, build_schedule
from prime_rl.trainer.perf import ModelCost, PerfMeter, cost_of
from prime_rl.trainer.profile import StepProfile
from prime_rl.trainer.publish.build import build_publisher
from prime_rl.trainer.ranks import Ranks, joined
from prime_rl.trainer.streams import BatchSource, LoggedBatches, LossFunction, Seekable
from prime_rl.trainer.trainer import LoopOptions, Trainer

_logger = get_logger(__name__)


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises: ConfigError for cuda where there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU here; set device to auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Wherein RL and SFT differ."""

    directory: Path
    """Of the model."""
    tokenizer: Path
    """The directory of that which the batches were made with; it is published with the weights."""
    batches: BatchSource
    loss: LossFunction
    keep_last: int | None
    """See Retention."""
    max_row_tokens: int
    """Tokens of the longest micro-batch that may come."""
    max_steps: int | None
    level: int = 0
    """How many steps generation may run ahead."""
    data: Seekable | None = None
    """Whose position is part of a checkpoint."""
    recorded: Path | None = None
    """Where batches lie, beside the orchestrator's state."""
    is_complete: Callable[[], bool] = lambda: False
    """Rank 0's: whether a run that goes on has nothing left to train. Raises: ConfigError where a new run would begin
    in the directory of another."""


def train(config: TrainerConfig | SFTConfig, inputs: Inputs) -> None:
    """Load the model, train it as configured together with the other ranks, close what was opened."""
    with joined(
        lambda: pick_device(config.device),
        timeout=config.dist_timeout_seconds,
        patience=patience(config),
        always=config.model.fsdp_cpu_offload,
    ) as ranks:
        if config.deterministic:
            make_deterministic(ranks.device)
        _train(config, inputs, ranks)


def patience(config: TrainerConfig | SFTConfig) -> float:
    """Seconds for which rank 0 may wait for other processes between two words to the other ranks.

    For a batch; and over NCCL for the servers to meet it, for the orchestrator, and for the servers to take weights.
    """
    if not isinstance(config, TrainerConfig):
        return 0.0
    broadcast = config.weight_broadcast
    return activity.patience_s(config.batch_timeout, "orchestrator") + (
        3 * broadcast.timeout if broadcast.type == "nccl" else 0
    )


def seed_dropout(seed: int, ranks: Ranks) -> None:
    """Have every run draw the same, and every rank something else: it drops elements of other documents.

    Everything else that is drawn has a generator of its own.
    """
    torch.manual_seed(seed + ranks.rank)


def _train(config: TrainerConfig | SFTConfig, inputs: Inputs, ranks: Ranks) -> None:
    if ranks.told("looking at what is there", inputs.is_complete):
        _logger.info("All %s steps are made: nothing is left to train", config.max_steps)
        if ranks.is_leader:
            _rules(config, inputs).tidy()  # what a kill right before that has left
        return
    # Of a record that still grows every rank may have seen another number of batches.
    inputs = replace(inputs, max_steps=ranks.gathered(inputs.max_steps)[0])
    paths, start = RunPaths(config.output_dir), choose_start(config, ranks)
    if inputs.max_steps is not None and start.first_step > inputs.max_steps:
        raise ConfigError(
            f"{start.checkpoint} is at step {start.first_step} already, beyond max_steps = {inputs.max_steps}"
        )
    model = _loaded(config, inputs.directory, ranks)
    optimizer = _optimizer(config, model, start)
    load_start(start, model=model, optimizer=optimizer, data=inputs.data, ranks=ranks)
    journal = Journal(paths.journal, "trainer")
    if ranks.is_leader:
        clear_way(config, start, journal, recorded=inputs.recorded)
    kept = _rules(config, inputs)
    with ExitStack() as stack:
        keeper = build_keeper(
            kept,
            start=start,
            journal=journal,
            model=model,
            optimizer=optimizer,
            data=inputs.data,
            ranks=ranks,
            stack=stack,
        )
        publisher = build_publisher(
            config,
            model=model,
            ranks=ranks,
            assets=inputs.directory,
            tokenizer=inputs.tokenizer,
            retention=kept.weights,
            journal=journal,
            stack=stack,
        )
        monitor = FanOut([JsonlMonitor(paths.metrics("trainer"))] if ranks.is_leader else [])
        stack.enter_context(closing(monitor))
        if start.checkpoint is not None and (start.first_step or isinstance(config, TrainerConfig)):
            publisher.publish_again(start.first_step)
        if start.skips_anything and kept.plan.recovery_interval_s is not None:
            keeper.save_recovery(start.first_step)  # the checkpoint on disk is not what the run goes on with
        cost = cost_of(model.model, read_json(inputs.directory / "config.json"))
        Trainer(
            model=model,
            optimizer=optimizer,
            batches=_logged(config, inputs),
            loss=inputs.loss,
            publisher=publisher,
            monitor=monitor,
            meter=PerfMeter(cost, ranks, _device_name(ranks)),
            options=_options(config, inputs, ranks, start, keeper, cost),
        ).run()


def _rules(config: TrainerConfig | SFTConfig, inputs: Inputs) -> Kept:
    return build_rules(
        config, max_steps=inputs.max_steps, keep_last=inputs.keep_last, level=inputs.level, recorded=inputs.recorded
    )


def _loaded(config: TrainerConfig | SFTConfig, directory: Path, ranks: Ranks) -> TrainedModel:
    with activity.doing("loading the model"):
        model = build_model(config.model, directory, ranks, seed=config.seed)
    seed_dropout(config.seed, ranks)  # now: drawing the weights of a model of transformers seeds all GPUs alike
    num_all = sum(parameter.numel() for parameter in model.model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters.values())
    of_all = "" if num_trained == num_all else f"{num_trained / 1e6:.1f}M of "
    size = f"{of_all}{num_all / 1e6:.1f}M parameters"
    _logger.info("Training %s, %s, on %d x %s", directory, size, ranks.size, _device_name(ranks))
    return model


def _optimizer(config: TrainerConfig | SFTConfig, model: TrainedModel, start: Start) -> Optimizer:
    ahead = start.progress().schedule_ahead
    schedule = build_schedule(config.scheduler, peak_lr=config.optim.lr, max_steps=config.max_steps)
    return build_optimizer(
        model.parameters.items(),
        config.optim,
        lambda step: schedule(step + ahead),
        cpu_offload=config.model.optim_cpu_offload,
    )


def _logged(config: TrainerConfig | SFTConfig, inputs: Inputs) -> BatchSource:
    return LoggedBatches(inputs.batches, load_tokenizer(inputs.tokenizer)) if config.log.log_data else inputs.batches


def _options(
    config: TrainerConfig | SFTConfig, inputs: Inputs, ranks: Ranks, start: Start, keeper: Keeper, cost: ModelCost
) -> LoopOptions:
    return LoopOptions(
        max_steps=inputs.max_steps,
        first_step=start.first_step,
        is_restarted=start.kind == "recover",
        num_skipped=start.progress().num_skipped,
        max_row_tokens=inputs.max_row_tokens,
        row_cost=_row_cost(cost),
        min_step_time_s=config.debug.min_step_time,
        max_skipped_steps=config.max_skipped_steps,
        ranks=ranks,
        profile=StepProfile(
            memory_dir=config.memory_profiler_path,
            trace_dir=config.trace_path,
            device=ranks.device,
            rank=ranks.rank,
        ),
        keeper=keeper,
    )


def _device_name(ranks: Ranks) -> str:
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"


def _row_cost(cost: ModelCost) -> CostModel:
    """What a document costs in FLOPs; of a window's attention, that of a document longer than it."""
    windows = sum(12 * units * window for units, window in cost.attention if window is not None)
    return CostModel(
        linear=cost.body_flops(1) + windows,
        quadratic=sum(6 * units for units, window in cost.attention if window is None),
        per_loss_token=cost.head_flops(1),
    )
