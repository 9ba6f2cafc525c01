"""AdamW, learning-rate schedules and gradient clipping."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from prime_rl.config.trainer import (
    AdamWConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
)

Schedule = Callable[[int], float]
"""Learning rate of a step, counted from 0. It has no state, so a resumed run needs none."""


def build_schedule(
    config: ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig,
    *,
    peak_lr: float,
    max_steps: int | None,
) -> Schedule:
    """The schedule that a configuration describes.

    The first step of a warm-up has `min_lr`, step `warmup_steps` is the first at the peak, and the last
    step of the run has `min_lr` again (linear: at the end of its `decay_steps`; cosine: from the peak on).
    """
    if isinstance(config, ConstantSchedulerConfig):
        return lambda step: peak_lr
    assert max_steps is not None, "the configuration refuses a decaying schedule without max_steps"
    last_step = max_steps - 1
    warmup_steps, min_lr = config.warmup_steps, config.min_lr

    def after_warmup(progress: Callable[[int], float]) -> Schedule:
        def schedule(step: int) -> float:
            if step < warmup_steps:
                return min_lr + (peak_lr - min_lr) * step / warmup_steps
            return peak_lr - (peak_lr - min_lr) * progress(step)

        return schedule

    if isinstance(config, CosineSchedulerConfig):
        return after_warmup(lambda step: (1 - math.cos(math.pi * _fraction(step, warmup_steps, last_step))) / 2)
    if config.decay_steps == 0:
        return after_warmup(lambda step: 0.0)
    decay_start = max_steps - config.decay_steps
    return after_warmup(lambda step: _fraction(step, decay_start, last_step) if step >= decay_start else 0.0)


def _fraction(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` to `end`: 0 to 1."""
    return 1.0 if step >= end else max(0, step - start) / (end - start)


class ScheduledAdamW:
    """AdamW (arXiv 1711.05101) with a clipped gradient norm and a scheduled learning rate.

    Weight decay is applied to matrices and not to one-dimensional parameters (norms and biases).
    """

    def __init__(self, model: nn.Module, config: AdamWConfig, schedule: Schedule) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            fused=True,
        )
        self._max_norm = config.max_norm
        self._schedule = schedule

    def clip(self) -> float:
        """Scale the gradients down to the largest allowed global L2 norm; returns the norm they had."""
        return float(clip_grad_norm_(self._parameters, self._max_norm))

    def apply(self, step: int) -> float:
        """Move the weights at the learning rate of `step`, which is returned, and clear the gradients."""
        lr = self._schedule(step)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return lr
