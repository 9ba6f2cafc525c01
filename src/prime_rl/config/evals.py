"""The evaluation's configuration."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.shared import (
    DEFAULT_OUTPUT_DIR,
    BaseConfig,
    ClientConfig,
    EnvConfig,
    LogConfig,
    ModelConfig,
    SamplingConfig,
    check_env_labels,
)


class EvalEnvConfig(EnvConfig):
    """One environment to evaluate on."""

    num_examples: int | None = Field(default=None, ge=-1)
    """Examples of this environment; -1 is all. None: the top-level `num_examples`."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Completions per example. None: the top-level `rollouts_per_example`."""


class EvalConfig(BaseConfig):
    """`eval`: measures a model, and the weights of a run, on environments."""

    model: ModelConfig = ModelConfig()

    client: ClientConfig | None = None
    """A running server to evaluate. None: one is started for `model` and stopped afterwards."""

    inference: InferenceConfig = InferenceConfig()
    """The server that is started when no client is given."""

    env: tuple[EvalEnvConfig, ...] = (EvalEnvConfig(),)
    """The environments."""

    sampling: SamplingConfig = SamplingConfig()

    num_examples: int = Field(default=-1, ge=-1)
    """Examples per environment. -1: all of its evaluation split."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Completions per example: the k of avg@k and pass@k."""

    max_concurrent: int = Field(default=64, ge=1)
    """Most rollouts in flight."""

    rollout_timeout: float = Field(default=600.0, gt=0)
    """Seconds a rollout may take, scoring included, before it counts as failed."""

    weights_dir: Path | None = None
    """A run's `weights`: its steps are evaluated one after the other. None: the model alone."""

    steps: tuple[int, ...] | None = None
    """Which steps of `weights_dir`. None: every one there is."""

    eval_base: bool = True
    """Whether the model itself is evaluated before the steps, as step 0."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Results go to `evals/step_N/<environment>/` below this."""

    log: LogConfig = LogConfig()

    @field_validator("env")
    @classmethod
    def _labels(cls, value: tuple[EvalEnvConfig, ...]) -> tuple[EvalEnvConfig, ...]:
        check_env_labels(value)
        return value

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Any:
        if self.weights_dir is None and not self.eval_base:
            raise ValueError("--no-eval-base leaves nothing to evaluate without weights_dir; give --weights-dir")
        if self.weights_dir is None and self.steps is not None:
            raise ValueError("steps are steps of weights_dir; give --weights-dir")
        return self
