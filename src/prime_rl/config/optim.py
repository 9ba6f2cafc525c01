"""Optimizers, and schedules of the learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from prime_rl.config.shared import BaseConfig


class _OptimizerConfig(BaseConfig):
    """What optimizers have in common."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its peak."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decay per step, times lr. Not applied to norms and biases."""

    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


class AdamWConfig(_OptimizerConfig):
    """AdamW (arXiv 1711.05101) with clipping of the gradient norm."""

    type: Literal["adamw"] = "adamw"

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the running mean of its square."""


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent with momentum. Its weight decay is part of the gradient, as in `torch.optim.SGD`."""

    type: Literal["sgd"] = "sgd"

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""

    nesterov: bool = True
    """Whether the step looks ahead along the momentum."""


class MuonConfig(AdamWConfig):
    """Muon for matrices (not embeddings and heads), AdamW for everything else; one `lr` suits both."""

    type: Literal["muon"] = "muon"  # type: ignore[assignment]  # the tag is what tells the two apart

    mu: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the matrices' updates."""


OptimizerConfig = Annotated[AdamWConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """The learning rate stays at its peak."""

    type: Literal["constant"] = "constant"


class LinearSchedulerConfig(BaseConfig):
    """Linear warm-up to the peak, the peak, then a linear fall to `min_lr` over the last steps."""

    type: Literal["linear"] = "linear"

    warmup_steps: int = Field(default=10, ge=0)
    """Steps from `min_lr` to the peak."""

    decay_steps: int = Field(default=10, ge=0)
    """Last steps, over which the rate falls."""

    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the last step."""


class CosineSchedulerConfig(BaseConfig):
    """Linear warm-up to the peak, then half a cosine down to `min_lr` at the last step."""

    type: Literal["cosine"] = "cosine"

    warmup_steps: int = Field(default=10, ge=0)
    """Steps from `min_lr` to the peak."""

    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the last step."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]
