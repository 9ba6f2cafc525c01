"""The orchestrator's configuration: environments, batches, and how far generation may run ahead of training."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.config.algorithms import AdvantageConfig, AnyAdvantageConfig, BufferConfig, FilterConfig
from prime_rl.config.artifacts import (
    FilesystemBroadcastConfig,
    FilesystemTransportConfig,
    OrchestratorCheckpointConfig,
    TransportConfig,
    WeightBroadcastConfig,
)
from prime_rl.config.conflict import Conflict
from prime_rl.config.evals import OnlineEvalConfig
from prime_rl.config.monitors import HeartbeatConfig, OrchestratorWandbConfig, PrimeMonitorConfig
from prime_rl.config.shared import (
    BaseConfig,
    ClientConfig,
    EnvConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    SamplingConfig,
    check_env_labels,
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (),
    "logits_processors": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "vllm_xargs": (),
    "extra_args": (),
}
"""Request fields that are no keys here, and the values under which the engine samples from softmax(logits / T)."""

_BENDS = (
    "the trainer cannot reproduce any other distribution than the policy's own: the importance ratio would be biased"
)


def _bends_sampling(name: str, value: Any) -> bool:
    return name in _NEUTRAL and value not in (None, [], {}, *_NEUTRAL[name])


class TemperatureScheduleConfig(BaseConfig):
    """A sampling temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the way from the first temperature to the last."""

    start_temperature: float = Field(gt=0, le=2)
    """Temperature of the first step."""

    end_temperature: float = Field(gt=0, le=2)
    """Temperature of the last step."""

    total_steps: int | None = Field(default=None, ge=1)
    """Steps from the first to the last temperature. None: `max_steps`."""


class TrainSamplingConfig(SamplingConfig):
    """How completions are sampled: from the policy itself, unfiltered."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits before the softmax; the trainer divides by the same value. Above 0: 0 is greedy."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the probability of tokens that are already there. Training needs 1: none."""

    min_tokens: int = Field(default=0, ge=0)
    """No stop token before this many tokens. Training needs 0."""

    temp_scheduler: TemperatureScheduleConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_keys_are_neutral(cls, value: Any) -> Any:
        """The older spellings that are left here have a value that training cannot do with."""
        given = [key for key in ("top_p", "top_k", "min_p") if isinstance(value, dict) and key in value]
        extra_body = value.get("extra_body") if given else None
        for key in given:
            if isinstance(extra_body, dict) and key in extra_body:
                raise Conflict(
                    f"{key} stands twice, here and in extra_body; remove both: {_BENDS}",
                    key,
                    f"extra_body.{key}",
                )
            raise Conflict(f"{_BENDS}; remove {key}", key)
        return value

    @model_validator(mode="after")
    def _one_temperature(self) -> Any:
        if self.temp_scheduler is not None and self.temperature != 1.0:
            raise Conflict(
                "set either temperature or temp_scheduler: both say how hot to sample", "temperature", "temp_scheduler"
            )
        return self


class TrainEnvConfig(EnvConfig):
    """One training environment."""

    ratio: float | None = Field(default=None, gt=0)
    """How often it is drawn, relative to the others. None: in proportion to its number of examples."""


class PolicyLoRAConfig(BaseConfig):
    """The adapter that this run trains, where several runs share a trainer."""

    name: str | None = None
    """Its name in the server. None: made from rank and alpha."""

    rank: int | None = Field(default=None, ge=1)
    """Its rank. None: the trainer's."""

    alpha: float = Field(default=32.0, ge=0)
    """Its scale."""


class PolicyModelConfig(ModelConfig):
    """The model that is trained."""

    lora: PolicyLoRAConfig | None = None


class RunOptimizerConfig(BaseConfig):
    """Optimizer of this run, where several runs share a trainer."""

    lr: float = Field(default=1e-4, ge=0)
    """Learning rate."""


class TeacherConfig(BaseConfig):
    """The model that is distilled from."""

    client: ClientConfig = Field(default_factory=ClientConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)


class RendererConfig(BaseConfig):
    """Turns conversations into tokens."""

    name: str = "auto"
    """Name of a renderer of the `renderers` library. auto: the one for the model."""


class ValConfig(BaseConfig):
    """Rewards on held-out examples of the training environments."""

    num_examples: int = Field(default=16, ge=1)
    """Examples."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Completions per example."""

    interval: int = Field(default=10, ge=1)
    """Steps between two such looks."""


class OrchestratorConfig(ProcessConfig):
    """`orchestrator`: runs environments against the inference server and turns rollouts into training batches."""

    client: ClientConfig = Field(default_factory=ClientConfig)
    model: PolicyModelConfig = Field(default_factory=PolicyModelConfig)
    optim: RunOptimizerConfig = Field(default_factory=RunOptimizerConfig)
    teacher_model: TeacherConfig | None = None
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    sampling: TrainSamplingConfig = Field(default_factory=TrainSamplingConfig)

    env: tuple[TrainEnvConfig, ...] = Field(default_factory=lambda: (TrainEnvConfig(),))
    """The training environments; each gives groups in proportion to its number of examples."""

    eval: OnlineEvalConfig | None = None
    val: ValConfig | None = None
    buffer: BufferConfig = Field(default_factory=BufferConfig)

    advantage: AnyAdvantageConfig | None = Field(default_factory=AdvantageConfig)
    """How rewards become advantages. None: the reward itself."""

    filters: tuple[FilterConfig, ...] = ()
    """Kinds of rollouts that are counted, or left out of training."""

    ckpt: OrchestratorCheckpointConfig | None = None
    wandb: OrchestratorWandbConfig | None = None
    prime_monitor: PrimeMonitorConfig | None = None
    heartbeat: HeartbeatConfig | None = None
    weight_broadcast: WeightBroadcastConfig = Field(default_factory=FilesystemBroadcastConfig)
    rollout_transport: TransportConfig = Field(default_factory=FilesystemTransportConfig)

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per training step. A multiple of `rollouts_per_example`."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Completions per example: the group whose mean reward is the baseline of the advantage."""

    token_batch_size: int | None = Field(default=None, ge=1)
    """Tokens per training step, instead of `batch_size` rollouts. None: count rollouts."""

    oversampling_factor: float = Field(default=1.0, ge=1)
    """Groups in flight per group of the batch: spares for those that fail or are filtered."""

    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """interleaved: turns make one sample while each prompt extends the exact tokens before it, else a new one starts.
    branching: one sample a turn."""

    mask_env_responses: bool = True
    """Whether tokens that the environment wrote are left out of the loss."""

    seq_len: int = Field(default=2048, ge=2)
    """Most tokens of a training sample. A longer rollout cannot be trained on whole: it is dropped and counted."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of batches to produce. None: until stopped."""

    max_async_level: int = Field(default=1, ge=0)
    """Batch n is generated by weights n - max_async_level or newer. 0: generation and training alternate."""

    strict_async_level: bool = False
    """Whether batch n is generated by weights n - max_async_level exactly, even where newer ones are there."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Weight updates that a group in progress may live through before it is cancelled and started anew."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Most rollouts in flight. None: as many as the asynchrony window holds."""

    tasks_per_minute: int | None = Field(default=None, ge=1)
    """Most rollouts that are started in a minute, per environment. None: no such limit."""

    workers_per_env: int = Field(default=1, ge=1)
    """Subprocesses per environment."""

    max_env_worker_restarts: int = Field(default=5, ge=-1)
    """Times in a row that a worker which died is started again before the run ends. -1: always."""

    num_train_workers: int = Field(default=1, ge=1)
    """Ranks of the trainer, each of which needs a rollout; with `rl` it follows from `trainer_gpu_ids`."""

    reload_weights_on_start: bool = True
    """Whether a server that serves other weights than this run starts from is given these first."""

    rollout_timeout: float = Field(default=600.0, gt=0)
    """Seconds a rollout may take, scoring included, before it counts as failed."""

    max_attempts: int = Field(default=3, ge=1)
    """Times a failed rollout is tried before its group is given up and another example is taken."""

    max_error_rate: float = Field(default=0.5, gt=0, le=1)
    """The run stops when more than this share of the last 64 or more rollouts failed (1: when all of them did)."""

    weights_timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for the trainer's next weights, while no batch can ship without them, before the run ends."""

    outage_timeout: float = Field(default=120.0, gt=0)
    """Seconds that the inference server may be gone in the middle of a run before the run ends."""

    bench: bool = False
    """Measure inference alone: a few batches, then a table."""

    seed: int = 42
    """Seeds the order of the examples."""

    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def groups_per_batch(self) -> int:
        """Groups that make one batch."""
        return self.batch_size // self.rollouts_per_example

    @property
    def staleness_bound(self) -> int:
        """Largest n - v of any token of batch n sampled by weights v; proven in docs/architecture.md."""
        return self.max_async_level + self.max_off_policy_steps if self.max_async_level else 0

    @field_validator("env")
    @classmethod
    def _labels(cls, value: tuple[TrainEnvConfig, ...]) -> tuple[TrainEnvConfig, ...]:
        check_env_labels(value)
        if len({env.ratio is None for env in value}) > 1:
            ratios = (f"{index}.ratio" for index in range(len(value)))
            raise Conflict("give all environments a ratio, or none", *ratios)
        return value

    @field_validator("sampling")
    @classmethod
    def _training_needs_a_temperature(cls, value: TrainSamplingConfig) -> TrainSamplingConfig:
        if value.temperature == 0:
            raise Conflict(
                "temperature 0 is greedy: every rollout of a group would be the same; set it above 0", "temperature"
            )
        bent = [f"extra_body.{key}" for key, field in sorted(value.extra_body.items()) if _bends_sampling(key, field)]
        bent += ["min_tokens"] if value.min_tokens else []
        bent += ["repetition_penalty"] if value.repetition_penalty != 1 else []
        if bent:
            raise Conflict(f"{_BENDS}; remove {' and '.join(bent)}", *bent)
        return value

    @model_validator(mode="after")
    def _whole_groups(self) -> Any:
        if self.batch_size % self.rollouts_per_example:
            down = self.batch_size - self.batch_size % self.rollouts_per_example
            raise Conflict(
                "batch_size must be divisible by rollouts_per_example; try batch_size "
                f"{down or self.rollouts_per_example}",
                "batch_size",
                "rollouts_per_example",
            )
        if self.batch_size < self.num_train_workers:
            raise Conflict(
                f"{self.batch_size} rollouts leave some of {self.num_train_workers} ranks of the trainer without work; "
                f"set batch_size to {self.num_train_workers} or more, or give the trainer fewer GPUs",
                "batch_size",
                "num_train_workers",
            )
        if self.max_concurrent is not None and self.max_concurrent < self.rollouts_per_example:
            raise Conflict(
                "max_concurrent must hold at least one group: set it to rollouts_per_example or more",
                "max_concurrent",
                "rollouts_per_example",
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Any:
        if self.buffer.env_ratios is not None and len(self.buffer.env_ratios) != len(self.env):
            raise Conflict(
                f"buffer.env_ratios has {len(self.buffer.env_ratios)} numbers for {len(self.env)} environments; "
                "give one each",
                "buffer.env_ratios",
                "env",
            )
        if self.token_batch_size is not None and "batch_size" in self.model_fields_set and self.batch_size != 128:
            raise Conflict(
                "set either batch_size or token_batch_size: both say when a batch is full",
                "batch_size",
                "token_batch_size",
            )
        return self
