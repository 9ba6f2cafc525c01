"""From a configuration to a running Trainer: what RL and SFT assemble alike."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from prime_rl import activity
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.data.balance import CostModel
from prime_rl.data.rendering import load_tokenizer
from prime_rl.errors import ConfigError
from prime_rl.logs import get_logger
from prime_rl.models.hf import read_json
from prime_rl.monitors.base import FanOut, JsonlMonitor
from prime_rl.paths import RunPaths
from prime_rl.trainer.deterministic import make_deterministic
from prime_rl.trainer.model.build import build_model
from prime_rl.trainer.optim.optimizer import build_optimizer, build_schedule
from prime_rl.trainer.perf import ModelCost, PerfMeter, cost_of
from prime_rl.trainer.profile import StepProfile
from prime_rl.trainer.publish.build import build_publisher
from prime_rl.trainer.ranks import Ranks, joined
from prime_rl.trainer.streams import BatchSource, LoggedBatches, LossFunction
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
    return activity.patience_s(config.batch_timeout) + (3 * broadcast.timeout if broadcast.type == "nccl" else 0)


def seed_dropout(seed: int, ranks: Ranks) -> None:
    """Have every run draw the same, and every rank something else: it drops elements of other documents.

    Everything else that is drawn has a generator of its own.
    """
    torch.manual_seed(seed + ranks.rank)


def _train(config: TrainerConfig | SFTConfig, inputs: Inputs, ranks: Ranks) -> None:
    directory, batches, paths = inputs.directory, inputs.batches, RunPaths(config.output_dir)
    with activity.doing("loading the model"):
        model = build_model(config.model, directory, ranks, seed=config.seed)
    seed_dropout(config.seed, ranks)  # now: drawing the weights of a model of transformers seeds all GPUs alike
    cost = cost_of(model.model, read_json(directory / "config.json"))
    device_name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    num_all = sum(parameter.numel() for parameter in model.model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters.values())
    of_all = "" if num_trained == num_all else f"{num_trained / 1e6:.1f}M of "
    size = f"{of_all}{num_all / 1e6:.1f}M parameters"
    _logger.info("Training %s, %s, on %d x %s", directory, size, ranks.size, device_name)
    if config.log.log_data:
        batches = LoggedBatches(batches, load_tokenizer(inputs.tokenizer))
    schedule = build_schedule(config.scheduler, peak_lr=config.optim.lr, max_steps=config.max_steps)
    with ExitStack() as stack:
        publisher = build_publisher(
            config,
            model=model,
            ranks=ranks,
            assets=directory,
            tokenizer=inputs.tokenizer,
            keep_last=inputs.keep_last,
            stack=stack,
        )
        monitor = FanOut([JsonlMonitor(paths.metrics("trainer"))] if ranks.is_leader else [])
        stack.enter_context(closing(monitor))
        Trainer(
            model=model,
            optimizer=build_optimizer(
                model.parameters.items(), config.optim, schedule, cpu_offload=config.model.optim_cpu_offload
            ),
            batches=batches,
            loss=inputs.loss,
            publisher=publisher,
            monitor=monitor,
            meter=PerfMeter(cost, ranks, device_name),
            options=LoopOptions(
                max_steps=config.max_steps,
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
            ),
        ).run()


def _row_cost(cost: ModelCost) -> CostModel:
    """What a document costs in FLOPs; of a window's attention, that of a document longer than it."""
    windows = sum(12 * units * window for units, window in cost.attention if window is not None)
    return CostModel(
        linear=cost.body_flops(1) + windows,
        quadratic=sum(6 * units for units, window in cost.attention if window is None),
        per_loss_token=cost.head_flops(1),
    )
