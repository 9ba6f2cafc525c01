"""The orchestrator's configuration: environments, batches, and how far generation may run ahead of training."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.config.algorithms import (
    AdvantageConfig,
    AnyAdvantageConfig,
    BufferConfig,
    DistillationConfig,
    FilterConfig,
    RewardAdvantageConfig,
)
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
from prime_rl.config.sampling import TrainSamplingConfig, check_is_policy
from prime_rl.config.shared import (
    BaseConfig,
    ClientConfig,
    EnvConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    check_env_labels,
)


class TrainEnvConfig(EnvConfig):
    """One training environment."""

    ratio: float | None = Field(default=None, gt=0)
    """How often it is drawn, relative to the others. None: in proportion to its number of examples."""

    advantage: AnyAdvantageConfig | None = None
    """How its rewards become advantages. None: as `orchestrator.advantage` says."""

    kl_weight: float | None = Field(default=None, ge=0)
    """Weight of its sampled tokens in the KL to the teacher. None: `teacher_model.kl_weight`."""


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
    """The model that is distilled from: a server that scores prompts (`prompt_logprobs`), with the run's tokenizer."""

    client: ClientConfig = Field(default_factory=ClientConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)

    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of sampled tokens in the KL to the teacher (`trainer.ref_kl`). 0: the teacher is in the advantage alone
    (`trainer.loss.teacher_tau`)."""

    max_concurrent: int = Field(default=64, ge=1)
    """Most samples that the teacher is sent at once."""


class RendererConfig(BaseConfig):
    """Turns conversations into tokens."""

    name: str = "auto"
    """Name of a renderer of the `renderers` library. auto: the one for the model."""


class ValConfig(BaseConfig):
    """Rewards on held-out examples of the training environments."""

    num_examples: int = Field(default=16, ge=1)
    """Examples of each environment: the last ones of its training split, which are never trained on."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Completions per example."""

    interval: int = Field(default=10, ge=1)
    """Steps between two such looks. The first and the last weights are looked at in any case."""


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
    """How rewards become advantages. None: the reward itself (`type = "reward"`)."""

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
    """Tokens of a training step's samples, instead of `batch_size` rollouts; whole groups, so a step has that many or a
    few more. None: count rollouts."""

    oversampling_factor: float = Field(default=1.0, ge=1)
    """Groups in flight per group of the batch: spares for those that fail or are filtered. Spares that are finished go
    into the next batch, unless they are too old for it."""

    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """interleaved: turns make one sample while each prompt extends the exact tokens before it, else a new one starts.
    branching: one sample a turn."""

    mask_env_responses: bool = True
    """Whether tokens that the environment wrote are left out of the loss. They must be: the policy did not sample them,
    so they have no importance ratio."""

    seq_len: int = Field(default=2048, ge=2)
    """Most tokens of a training sample. A longer rollout is left out of training (`too_long`), while its reward counts
    in the baseline of its group."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of batches to produce. None: until stopped."""

    max_async_level: int = Field(default=1, ge=0)
    """Batch n is generated by weights n - max_async_level or newer. 0: generation and training alternate."""

    strict_async_level: bool = False
    """Whether batch n is generated by weights n - max_async_level exactly (the first ones by weights 0), even where
    newer ones are there."""

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

    env_setup_timeout: float = Field(default=300.0, gt=0)
    """Seconds a worker may take to load an environment, downloads included, before it is ended and begins again; the
    third time in a row, the run ends."""

    rollout_timeout: float = Field(default=600.0, gt=0)
    """Seconds a rollout may take, scoring included, before it counts as failed."""

    max_attempts: int = Field(default=3, ge=1)
    """Times a failed rollout is tried before its group is given up and another example is taken."""

    max_error_rate: float = Field(default=0.5, gt=0, le=1)
    """The run stops when more than this share of an environment's last rollouts failed (1: when all did), of the last
    `batch_size` or 64."""

    weights_timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for the trainer's next weights, while no batch can ship without them, before the run ends."""

    outage_timeout: float = Field(default=120.0, gt=0)
    """Seconds that the inference server may be gone in the middle of a run before the run ends."""

    max_traces_gb: float = Field(default=4.0, ge=0)
    """GiB that the traces of rollouts (`traces/` in the run directory) may take; beyond it those of the oldest steps
    are deleted. 0: none are written."""

    bench: bool = False
    """Measure inference alone: a few batches, then a table."""

    seed: int = 42
    """Seeds the order of the examples."""

    deterministic: bool = False
    """Whether what makes a batch depends on seed and weights alone: groups are run in rounds and judged in their order,
    and every request has a seed of its own. Needs `max_async_level = 0`, and one server that is deterministic too."""

    recover: bool = False
    """Whether to go on after the newest complete batch in the run directory, with the state beside it. `rl` sets it
    when it starts an orchestrator again."""

    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def groups_per_batch(self) -> int:
        """Groups that make one batch."""
        return self.batch_size // self.rollouts_per_example

    @property
    def longest_rollout_s(self) -> float:
        """Seconds after which a run in which no rollout has ended stands still: all attempts of one, with scoring."""
        slowest = (max(env.rollout_timeout or self.rollout_timeout, env.score_timeout or 0.0) for env in self.env)
        return self.max_attempts * 2 * max(slowest, default=self.rollout_timeout)

    @property
    def staleness_bound(self) -> int:
        """Largest n - v of any token of batch n sampled by weights v; proven in docs/architecture.md."""
        is_exact = self.max_async_level == 0 or self.strict_async_level
        return self.max_async_level + (0 if is_exact else self.max_off_policy_steps)

    @property
    def env_ratios(self) -> dict[str, float] | None:
        """How often each environment is drawn, relative to the others. None: in proportion to its examples."""
        ratios = self.buffer.env_ratios or [env.ratio for env in self.env if env.ratio is not None]
        return dict(zip((env.label for env in self.env), ratios, strict=True)) if ratios else None

    def advantage_of(self, env: TrainEnvConfig) -> AnyAdvantageConfig:
        """How rewards of the environment become advantages."""
        return env.advantage or self.advantage or RewardAdvantageConfig()

    def kl_weight(self, env: TrainEnvConfig) -> float:
        """Weight of the environment's sampled tokens in the KL to the teacher."""
        if self.teacher_model is None:
            return 0.0
        return self.teacher_model.kl_weight if env.kl_weight is None else env.kl_weight

    def is_taught(self, env: TrainEnvConfig) -> bool:
        """Whether the environment's rollouts learn from a teacher: by the KL, or, where none does, by the advantage."""
        if self.teacher_model is None:
            return False
        return self.kl_weight(env) > 0 or not any(self.kl_weight(other) for other in self.env)

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
    def _samples_from_the_policy(cls, value: TrainSamplingConfig) -> TrainSamplingConfig:
        check_is_policy(value)
        return value

    @model_validator(mode="after")
    def _whole_groups(self) -> Any:
        in_tokens = self.token_batch_size is not None
        if not in_tokens and self.batch_size % self.rollouts_per_example:
            down = self.batch_size - self.batch_size % self.rollouts_per_example
            raise Conflict(
                "batch_size must be divisible by rollouts_per_example; try batch_size "
                f"{down or self.rollouts_per_example}",
                "batch_size",
                "rollouts_per_example",
            )
        if not in_tokens and self.batch_size < self.num_train_workers:
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
    def _only_what_was_sampled(self) -> Any:
        if not self.mask_env_responses:
            raise Conflict(
                "what the environment wrote was not sampled by the policy, so it has no importance ratio to train by; "
                "remove mask_env_responses, and to learn such tokens use sft (cross-entropy)",
                "mask_env_responses",
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
        if self.buffer.env_ratios is not None and self.env[0].ratio is not None:
            ratios = (f"env.{index}.ratio" for index in range(len(self.env)))
            raise Conflict(
                "set either buffer.env_ratios or each environment's ratio: both say how often it is drawn",
                "buffer.env_ratios",
                *ratios,
            )
        if self.token_batch_size is not None and "batch_size" in self.model_fields_set and self.batch_size != 128:
            raise Conflict(
                "set either batch_size or token_batch_size: both say when a batch is full",
                "batch_size",
                "token_batch_size",
            )
        return self

    @model_validator(mode="after")
    def _can_be_deterministic(self) -> Any:
        if self.deterministic and self.max_async_level:
            raise Conflict(
                "with generation ahead of training it is a matter of time which weights sample what: set "
                "max_async_level to 0, or leave deterministic out",
                "deterministic",
                "max_async_level",
            )
        if self.deterministic and len(self.client.base_url) > 1:
            raise Conflict(
                "several servers need not compute alike: name one, or leave deterministic out",
                "deterministic",
                "client.base_url",
            )
        if self.deterministic and self.bench:
            raise Conflict("bench measures what depends on time: leave deterministic out", "deterministic", "bench")
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Any:
        schedule = self.sampling.temp_scheduler
        if schedule is not None and schedule.total_steps is None and self.max_steps is None:
            raise Conflict(
                "a run without an end has no last temperature; set sampling.temp_scheduler.total_steps, or max_steps",
                "sampling.temp_scheduler.total_steps",
                "max_steps",
            )
        return self

    @model_validator(mode="after")
    def _something_is_learned(self) -> Any:
        """Every environment has something to learn from."""
        if self.buffer.skip_verification and self.teacher_model is None:
            raise Conflict(
                "without rewards there is only a teacher to learn from: add [orchestrator.teacher_model], or drop "
                "skip_verification",
                "buffer.skip_verification",
                "teacher_model",
            )
        for index, env in enumerate(self.env):
            advantage, key = self.advantage_of(env), f"env.{index}.advantage" if env.advantage else "advantage"
            if env.kl_weight is not None and self.teacher_model is None:
                needs = "kl_weight needs a teacher: add [orchestrator.teacher_model]"
                raise Conflict(needs, f"env.{index}.kl_weight", "teacher_model")
            if isinstance(advantage, DistillationConfig) and not self.kl_weight(env):
                raise Conflict(
                    "distillation learns from the KL to a teacher alone: add [orchestrator.teacher_model] with a "
                    "kl_weight above 0",
                    f"{key}.type",
                    "teacher_model",
                )
            is_alone = self.rollouts_per_example == 1
            if isinstance(advantage, AdvantageConfig) and advantage.leave_one_out and is_alone:
                raise Conflict(
                    "leave_one_out compares a rollout to the others of its example, and there are none; set "
                    "rollouts_per_example to 2 or more",
                    f"{key}.leave_one_out",
                    "rollouts_per_example",
                )
        return self
