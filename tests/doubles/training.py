"""Training as the trainer does it, on batches that are there already: what a test runs on each rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from prime_rl.config.algorithms import LossConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.data.balance import CostModel
from prime_rl.data.packing import build_batch
from prime_rl.data.samples import NOT_SAMPLED, TrainingBatch, TrainingSample
from prime_rl.models.hf import read_json
from prime_rl.monitors.base import FakeMonitor
from prime_rl.trainer.ckpt import load_state, save_state, state_of
from prime_rl.trainer.model.build import TrainedModel, build_model
from prime_rl.trainer.optim import host_state
from prime_rl.trainer.optim.optimizer import build_optimizer
from prime_rl.trainer.perf import PerfMeter, cost_of
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.streams import LossFunction, LossOutput, TokenStreams
from prime_rl.trainer.trainer import LoopOptions, Trainer

VOCAB_SIZE = 300
ROW_TOKENS = 64
LR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to train, from which of five batches to which, and what of it to keep."""

    directory: Path
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    bucket_bytes: int = host_state.BUCKET_BYTES
    """With `optim_cpu_offload`: of how much optimizer state visits the device at once."""
    steps: range = range(5)
    spoilt: tuple[int, int] | None = None
    """A step and a rank whose loss is NaN then; such a step is left out."""
    load: Path | None = None
    save: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a rank knows at the end; only rank 0 has metrics."""

    metrics: list[dict[str, float]]
    weights: dict[str, npt.NDArray[np.float32]]
    num_held: int
    """Elements of all tensors that this rank holds."""
    num_caught_up: int
    """How often the publisher was told to catch up; rank 0 has asked for it once."""

    def logged(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics]


def batches() -> list[TrainingBatch]:
    """Five batches of unequal documents; the third has fewer than four ranks can share."""
    return [batch_of(step, count) for step, count in enumerate((14, 9, 3, 14, 11))]


def batch_of(step: int, count: int) -> TrainingBatch:
    rng = np.random.default_rng(step)
    samples = []
    for number in range(count):
        length = int(rng.integers(4, 40))
        sampled = np.arange(length) >= int(rng.integers(1, length))
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
                loss_mask=sampled,
                logprobs=np.where(sampled, -4 - 3 * rng.random(length), 0).astype(np.float32),
                versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
                temperature=float(0.5 + rng.random()),
                advantage=float(rng.normal()),
                reward=0.0,
                env_name="e",
                rollout_id=str(number),
            )
        )
    return build_batch(samples, step=step, seq_len=ROW_TOKENS)


def train_all(ranks: Ranks, cases: Sequence[Case]) -> list[Trained]:
    """Train each case; all ranks at once."""
    return [_train(ranks, case) for case in cases]


def _train(ranks: Ranks, case: Case) -> Trained:
    config = TrainerConfig.model_validate(
        {"model": {"name": str(case.directory), **case.model}, "optim": {"type": "adamw", "lr": LR, **case.optim}}
    )
    model = build_model(config.model, case.directory, ranks, seed=0)
    with patch.object(host_state, "BUCKET_BYTES", case.bucket_bytes):
        optimizer = build_optimizer(
            model.parameters.items(), config.optim, lambda step: LR, cpu_offload=config.model.optim_cpu_offload
        )
    if case.load is not None:
        load_state(case.load, model, optimizer)
    monitor, publisher = FakeMonitor(), _Publisher()
    given = _Batches([batches()[step] for step in case.steps])
    Trainer(
        model=model,
        optimizer=optimizer,
        batches=given,
        loss=_loss(given, ranks, case.spoilt),
        publisher=publisher,
        monitor=monitor,
        meter=PerfMeter(cost_of(model.model, read_json(case.directory / "config.json")), ranks, "cpu"),
        options=LoopOptions(
            max_steps=len(case.steps),
            max_row_tokens=ROW_TOKENS,
            row_cost=CostModel(linear=1.0),
            ranks=ranks,
            max_skipped_steps=0 if case.spoilt is None else 1,
        ),
    ).run()
    if case.save is not None:
        save_state(case.save, state_of(model, optimizer))
    held = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in model.stored().values()]
    return Trained(
        metrics=[metrics for _, metrics in monitor.rows],
        weights={name: tensor.float().cpu().numpy() for name, tensor in _whole(model).items()},
        num_held=sum(tensor.numel() for tensor in held),
        num_caught_up=publisher.num_caught_up,
    )


def _whole(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in model.stored().items()
    }


def _loss(given: "_Batches", ranks: Ranks, spoilt: tuple[int, int] | None) -> LossFunction:
    loss = build_loss(LossConfig(kl_tau=0.1))

    def spoilt_loss(streams: TokenStreams) -> LossOutput:
        output = loss(streams)
        factor = math.nan if (given.step, ranks.rank) == spoilt else 1.0
        return replace(output, sums={name: factor * total for name, total in output.sums.items()})

    return spoilt_loss


class _Batches:
    def __init__(self, batches: Sequence[TrainingBatch]) -> None:
        self._batches = batches
        self.step = -1

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        idle()

    def next(self, step: int) -> TrainingBatch:
        self.step = step
        return self._batches[step]


class _Publisher:
    """Wants to publish once more when it is first asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_caught_up = 0

    def publish(self, step: int) -> None:
        pass

    def publish_again(self, step: int) -> None:
        pass

    def idle(self) -> bool:
        self.num_asked += 1
        return self.num_asked == 1

    def catch_up(self) -> None:
        self.num_caught_up += 1

    def finish(self) -> None:
        pass
