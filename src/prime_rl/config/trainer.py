"""The trainer's configuration: RL (`TrainerConfig`) and SFT (`SFTConfig`) share everything but data and loss."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.config.shared import DEFAULT_OUTPUT_DIR, BaseConfig, Device, LogConfig, ModelConfig


class TrainerModelConfig(ModelConfig):
    """The model that is trained."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens of one packed micro-batch; no sample may be longer."""

    optimization_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of forward and backward. Master weights and optimizer state stay float32."""


class AdamWConfig(BaseConfig):
    """AdamW (arXiv 1711.05101) with clipping of the gradient norm."""

    type: Literal["adamw"] = "adamw"

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its peak."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay per step, times lr. Not applied to norms and biases."""

    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the running mean of its square."""


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


class LossConfig(BaseConfig):
    """Importance-weighted policy gradient with masked tokens; formula and sources in `trainer.rl.loss`."""

    type: Literal["default"] = "default"

    dppo_mask_low: float = Field(default=0.2, ge=0)
    """Tokens of advantage <= 0 are left out when their probability fell by more than this since they were sampled."""

    dppo_mask_high: float = Field(default=0.2, ge=0)
    """Tokens of advantage > 0 are left out when their probability rose by more than this since they were sampled."""

    adv_tau: float = Field(default=1.0, ge=0)
    """Factor of the policy-gradient term."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Factor of the squared log-ratio, which pulls the policy towards the one that sampled."""


class WeightsConfig(BaseConfig):
    """Which `weights/step_N` stay on disk."""

    interval: int | None = Field(default=None, ge=1)
    """Keep every N-th step's weights for good. None: only those the run still needs, and the last."""


class DebugConfig(BaseConfig):
    """For measuring and testing the system itself."""

    min_step_time: float = Field(default=0.0, ge=0)
    """Seconds that a step takes at least: a stand-in for a larger model when overlap is measured."""


class _BaseTrainerConfig(BaseConfig):
    """What RL and SFT configure alike."""

    model: TrainerModelConfig = TrainerModelConfig()
    optim: AdamWConfig = AdamWConfig()
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    weights: WeightsConfig = WeightsConfig()
    debug: DebugConfig = DebugConfig()

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. None: until stopped."""

    seed: int = 42
    """Seeds initial weights where the model directory has none. (The order of SFT data has `data.seed`.)"""

    device: Device = "auto"
    """Where to train. auto: the first visible GPU, else the CPU."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """The run directory."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _schedule_fits(self) -> Any:
        if isinstance(self.scheduler, ConstantSchedulerConfig):
            return self
        if self.max_steps is None:
            raise ValueError(f"scheduler.type {self.scheduler.type!r} needs max_steps, to know where it ends")
        decay = self.scheduler.decay_steps if isinstance(self.scheduler, LinearSchedulerConfig) else 0
        if self.scheduler.warmup_steps + decay > self.max_steps:
            raise ValueError(
                f"scheduler: {self.scheduler.warmup_steps} warm-up and {decay} decay steps do not fit into "
                f"max_steps {self.max_steps}"
            )
        return self


class TrainerConfig(_BaseTrainerConfig):
    """`trainer`: turns batch n and weights n into weights n + 1."""

    loss: LossConfig = LossConfig()

    max_async_level: int = Field(default=1, ge=0)
    """How many steps generation may run ahead; weights that it may still need are kept on disk."""

    batch_timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a batch of the orchestrator before the run ends with an error."""


class LossMaskConfig(BaseConfig):
    """Whose tokens are trained on."""

    system: bool = False
    user: bool = False
    assistant: bool = True
    tool: bool = False


class SFTDataConfig(BaseConfig):
    """The data set, and how it is batched."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """A JSONL or Parquet file, a directory of them, or a hub data set; rows of `messages` or `prompt`/`completion`."""

    splits: tuple[str, ...] | None = None
    """Splits of a hub data set. None: `train`."""

    batch_size: int = Field(default=128, ge=1)
    """Packed rows of `seq_len` tokens per step."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per packed row. A longer example is skipped and counted."""

    shuffle: bool = True
    """Whether each epoch has an order of its own."""

    seed: int = 0
    """Seeds that order."""

    loss_mask: LossMaskConfig = LossMaskConfig()


class SFTConfig(_BaseTrainerConfig):
    """`sft`: supervised fine-tuning on conversations."""

    data: SFTDataConfig = SFTDataConfig()

    clean: bool = False
    """Delete what an earlier run left in the run directory. Without it, a used directory is refused."""
