"""From a configuration to a running Trainer: what RL and SFT assemble alike."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import nn

from prime_rl.config.trainer import AdamWConfig, SFTConfig, TrainerConfig
from prime_rl.data.rendering import load_tokenizer
from prime_rl.errors import ConfigError
from prime_rl.logs import get_logger
from prime_rl.models.hf import read_json
from prime_rl.monitors.base import JsonlMonitor
from prime_rl.paths import RunPaths
from prime_rl.trainer.model import TrainedModel, build_model
from prime_rl.trainer.optim import ScheduledAdamW, build_schedule
from prime_rl.trainer.perf import PerfMeter, cost_of
from prime_rl.trainer.publish import BroadcastPublisher, Publisher, WeightPublisher
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.script import refuse_several_processes
from prime_rl.trainer.streams import BatchSource, LoggedBatches, LossFunction
from prime_rl.trainer.trainer import LoopOptions, Trainer
from prime_rl.transport.nccl import NcclSender

_logger = get_logger(__name__)


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises: ConfigError for cuda where there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU here; set device to auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def train(
    config: TrainerConfig | SFTConfig,
    *,
    directory: Path,
    tokenizer: Path,
    batches: BatchSource,
    loss: LossFunction,
    keep_last: int | None,
    max_row_tokens: int,
) -> None:
    """Load the model of `directory`, train it as configured, close what was opened.

    `tokenizer`: the directory of that which the batches were made with; it is published with the weights.
    `keep_last`: see WeightPublisher.
    """
    refuse_several_processes()
    assert isinstance(config.optim, AdamWConfig), "other optimizers are refused at the start (config.pending)"
    device = pick_device(config.device)
    paths = RunPaths(config.output_dir)
    dtype = torch.bfloat16 if config.model.optimization_dtype == "bfloat16" else torch.float32
    ranks = Ranks(rank=0, size=1, device=device)
    model = build_model(config.model, directory, ranks, seed=config.seed)
    schedule = build_schedule(config.scheduler, peak_lr=config.optim.lr, max_steps=config.max_steps)
    files = WeightPublisher(
        model=model,
        weights_dir=paths.weights,
        assets=directory,
        tokenizer=tokenizer,
        dtype=dtype,
        max_steps=config.max_steps,
        interval=config.weights.interval,
        keep_last=keep_last,
    )
    options = LoopOptions(
        max_steps=config.max_steps,
        max_row_tokens=max_row_tokens,
        min_step_time_s=config.debug.min_step_time,
    )
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    num_parameters = sum(parameter.numel() for parameter in model.model.parameters())
    _logger.info("Training %s, %.1fM parameters, on %s", directory, num_parameters / 1e6, device_name)
    if config.log.log_data:
        batches = LoggedBatches(batches, load_tokenizer(tokenizer))
    with ExitStack() as stack:
        publisher = _publisher(config, files, model, dtype, stack)
        monitor = stack.enter_context(closing(JsonlMonitor(paths.metrics("trainer"))))
        Trainer(
            model=model,
            optimizer=ScheduledAdamW(nn.ParameterList(model.parameters.values()), config.optim, schedule),
            batches=batches,
            loss=loss,
            publisher=publisher,
            monitor=monitor,
            meter=PerfMeter(cost_of(model.model, read_json(directory / "config.json")), ranks, device_name),
            options=options,
        ).run()


def _publisher(
    config: TrainerConfig | SFTConfig, files: WeightPublisher, model: TrainedModel, dtype: torch.dtype, stack: ExitStack
) -> Publisher:
    """`files`, or what sends from GPU to GPU before it; a trainer that was started alone takes `auto` for files."""
    if not isinstance(config, TrainerConfig) or config.weight_broadcast.type != "nccl":
        return files
    broadcast = config.weight_broadcast
    sender = NcclSender(
        host=broadcast.host,
        port=broadcast.port,
        world_size=1 + broadcast.inference_world_size,
        device=model.device,
        timeout=broadcast.timeout,
    )
    stack.callback(sender.close)
    root = RunPaths(config.output_dir).broadcasts
    return BroadcastPublisher(
        model=model, dtype=dtype, sender=sender, root=root, timeout=broadcast.timeout, files=files
    )
