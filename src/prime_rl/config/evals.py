"""The evaluation's configuration: `eval`, and the evaluation that goes on during training."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from prime_rl.config.conflict import Conflict
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.monitors import WandbConfig
from prime_rl.config.shared import (
    DEFAULT_OUTPUT_DIR,
    BaseConfig,
    ClientConfig,
    EnvConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    SamplingConfig,
    check_env_labels,
)


def _all_or_some(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be -1 for all examples, or 1 or more, got 0")
    return value


NumExamples = Annotated[int, Field(ge=-1), AfterValidator(_all_or_some)]


class EvalEnvConfig(EnvConfig):
    """One environment to evaluate on."""

    num_examples: NumExamples | None = None
    """Examples of this environment; -1 is all. None: the top-level `num_examples`."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Completions per example. None: the top-level `rollouts_per_example`."""

    skip_first: int = Field(default=0, ge=0)
    """Examples that are left out at the beginning."""


class EvalSamplingConfig(SamplingConfig):
    """How completions are sampled in an evaluation. None: not sent, so as the server does by default."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Divides the logits before the softmax. 0 is greedy. None: 1 with the embedded engine, with vLLM the model's."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""

    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many most probable tokens. -1: from all."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this share of the most probable one's probability."""

    repetition_penalty: float | None = Field(default=None, gt=0)
    """Divides the probability of tokens that are already there. 1: none."""

    min_tokens: int | None = Field(default=None, ge=0)
    """No stop token before this many tokens."""

    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """How long the model should think, where it can be told."""


class SaveDiskConfig(BaseConfig):
    """Saves results to a directory."""

    path: Path | None = None
    """The directory. None: `evals` in the run directory."""


class SaveHubConfig(BaseConfig):
    """Saves results as a hub data set."""

    dataset_name: str | None = None
    """Its name. None: made from model and environment."""

    dataset_subset: str | None = None
    """Its subset."""

    dataset_split: str | None = None
    """Its split."""

    private: bool = False
    """Whether only its owner sees it."""


class SaveConfig(BaseConfig):
    """Where results go, besides `evals` in the run directory."""

    disk: SaveDiskConfig | None = None
    hf: SaveHubConfig | None = None

    env_hub: bool = False
    """Whether results are sent to the environment hub."""

    stream: bool = False
    """Whether each result is written when it is there, so that an interrupted evaluation can be resumed."""


class RetryConfig(BaseConfig):
    """How often a failed rollout is tried again."""

    max_attempts: int = Field(default=10, ge=1)
    """Tries, the first included."""

    wait_multiplier: float = Field(default=1.0, ge=0)
    """Seconds before the second try; each further wait is twice as long."""

    wait_min: float = Field(default=1.0, ge=0)
    """Shortest wait in seconds."""

    wait_max: float = Field(default=60.0, ge=0)
    """Longest wait in seconds."""

    reraise: bool = False
    """Whether a rollout that failed for good ends the evaluation."""


class _BaseEvalConfig(BaseConfig):
    """What evaluations have in common."""

    env: tuple[EvalEnvConfig, ...] = Field(default_factory=lambda: (EvalEnvConfig(),))
    """The environments."""

    sampling: EvalSamplingConfig = Field(default_factory=EvalSamplingConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)

    num_examples: NumExamples = -1
    """Examples per environment. -1: all of its evaluation split."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Completions per example: the k of avg@k and pass@k."""

    reasoning_field: str = "reasoning_content"
    """Field of an answer that holds the model's reasoning."""

    per_rollout: bool = False
    """Whether rollouts are scored one by one as they end, instead of by example."""

    @field_validator("env")
    @classmethod
    def _labels(cls, value: tuple[EvalEnvConfig, ...]) -> tuple[EvalEnvConfig, ...]:
        check_env_labels(value)
        return value


class OnlineEvalConfig(_BaseEvalConfig):
    """Evaluation during training."""

    interval: int = Field(default=100, ge=1)
    """Steps between two evaluations. The weights after the last step are evaluated in any case."""

    eval_base_model: bool = True
    """Whether the model that the run begins with is evaluated too."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Of the rollouts in flight, those that an evaluation may always have; training keeps the others."""

    skip_eval_on_resume: bool = True
    """Whether a resumed run leaves out the evaluation of the step it starts from."""

    cancel_inflight_rollouts_on_eval: bool = False
    """Whether training rollouts in flight make room for an evaluation, which then runs alone and on one version of the
    weights. They are run anew afterwards; until then neither training rollouts nor new weights are taken."""


class EvalConfig(_BaseEvalConfig, ProcessConfig):
    """`eval`: measures a model, and the weights of a run, on environments."""

    model: ModelConfig = Field(default_factory=ModelConfig)

    client: ClientConfig | None = None
    """A running server to evaluate. None: one is started for `model` and stopped afterwards."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """The server that is started when no client is given."""

    wandb: WandbConfig | None = None

    max_concurrent: int | None = Field(default=64, ge=1)
    """Most rollouts in flight. None: all at once; those that wait in the server run into `rollout_timeout`."""

    env_setup_timeout: float = Field(default=300.0, gt=0)
    """Seconds a worker may take to load an environment, downloads included, before it is ended and begins again; the
    third time in a row, the run ends."""

    rollout_timeout: float = Field(default=600.0, gt=0)
    """Seconds a rollout may take, scoring included, before it counts as failed."""

    use_tqdm: bool = False
    """Whether a progress bar is shown."""

    resume_path: Path | None = None
    """Results of an interrupted evaluation (`save.stream`) to go on from. None: start anew."""

    watcher: bool = False
    """Whether to wait for further steps in `weights_dir` and evaluate them as they come."""

    weights_dir: Path | None = None
    """A run's `weights`: its steps are evaluated one after the other. None: the model alone."""

    steps: tuple[int, ...] | None = None
    """Which steps of `weights_dir`. None: every one there is."""

    eval_base: bool = True
    """Whether the model itself is evaluated before the steps, as step 0."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Results go to `evals/step_N/<environment>/` below this."""

    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Any:
        if self.weights_dir is None and not self.eval_base:
            raise Conflict(
                "without its base model (--no-eval-base) and without weights_dir there is nothing to evaluate; give "
                "--weights-dir",
                "eval_base",
                "weights_dir",
            )
        if self.weights_dir is None and self.steps is not None:
            raise Conflict("steps are steps of weights_dir; give --weights-dir", "steps", "weights_dir")
        return self

    @model_validator(mode="after")
    def _something_to_go_on_from(self) -> Any:
        if self.resume_path is None:
            return self
        if not self.save.stream:
            raise Conflict("resume_path goes on from streamed results: set save.stream", "resume_path", "save.stream")
        several = [key for key, items in {"env": self.env, "steps": self.steps or ()}.items() if len(items) > 1]
        if several:
            raise Conflict(
                "resume_path is of one environment at one step: evaluate the others separately", "resume_path", *several
            )
        return self
