"""What several processes configure alike: the base class, model, log, client, sampling and environment sections."""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from prime_rl.config.conflict import Conflict

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


class BaseConfig(BaseModel):
    """Frozen, refuses unknown keys, and every field carries a docstring (unit, meaning of the default).

    The classes load fast, for `--help`: pydantic builds a schema when the first value is validated, hence the default
    of every section is a factory; docstrings are read from the source when somebody asks (`schema.documentation`).
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in free tables
    )


class ModelConfig(BaseConfig):
    """Which model."""

    name: str = DEFAULT_MODEL
    """A local directory in Hugging Face format, or a hub name."""

    trust_remote_code: bool = False
    """Whether code that comes with the model may run here."""


class TokenizerConfig(BaseConfig):
    """Which tokenizer."""

    name: str | None = None
    """A local directory or a hub name. None: the model's."""

    trust_remote_code: bool | None = None
    """Whether code that comes with the tokenizer may run here. None: as for the model."""

    chat_template: str | None = None
    """Jinja template of a conversation, or a file with one. None: the tokenizer's own."""


Level = Annotated[
    Literal["debug", "info", "warning", "error"], BeforeValidator(lambda value: "warning" if value == "warn" else value)
]


class SharedLogConfig(BaseConfig):
    """What the processes write to their logs."""

    level: Level = "info"
    """The least severe kind of line that is written."""

    file: bool = True
    """Whether a process that is started alone writes its log to `logs/` too."""

    json_logging: bool = False
    """Whether a log line is a JSON object instead of text."""


class TrainerLogConfig(SharedLogConfig):
    """What the trainer writes to its log."""

    log_data: bool = False
    """Whether the first sample of every batch is logged as text."""


class LogConfig(TrainerLogConfig):
    """What a process that runs environments writes to its log."""

    vf_level: Level = "warning"
    """The least severe kind of line of the environments' library (`verifiers`)."""

    env_worker_logs: bool = True
    """Whether each environment's workers write to `logs/envs/`."""


class ElasticConfig(BaseConfig):
    """Servers that come and go behind one name."""

    hostname: str
    """Name whose addresses are the servers."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of each."""

    sync_interval: float = Field(default=5.0, gt=0)
    """Seconds between two looks at who is there."""


class ClientConfig(BaseConfig):
    """How to reach the inference server."""

    base_url: tuple[str, ...] = ("http://localhost:8000/v1",)
    """Address of the OpenAI-compatible API, ending in `/v1`; several servers share the work."""

    admin_base_url: tuple[str, ...] | None = None
    """The servers themselves, where `base_url` is that of a router in front of them: each is watched and gets the
    weights. None: `base_url` is."""

    timeout: float = Field(default=1200.0, gt=0)
    """Seconds a single request may take."""

    ready_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for the server to come up before the run ends with an error."""

    api_key_var: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the server's bearer key. Unset variable: no key is sent."""

    headers: dict[str, str] = {}
    """Sent with every request."""

    skip_model_check: bool = False
    """Whether to go on without asking the server if it serves the model."""

    elastic: ElasticConfig | None = None

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the servers themselves."""
        return self.admin_base_url or self.base_url

    @field_validator("base_url", "admin_base_url", mode="before")
    @classmethod
    def _one_address_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("base_url", "admin_base_url")
    @classmethod
    def _addresses(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not value:
            raise ValueError("needs an address, like http://localhost:8000/v1")
        for index, address in enumerate(value):
            if address in value[:index]:
                raise ValueError(f"{address!r} stands twice; a server is named once")
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; write it as http://host:port/v1")
            try:
                urlsplit(address).port  # noqa: B018  # it is the look that raises
            except ValueError:
                raise ValueError(f"{address!r} has no valid port; write it as http://host:port/v1") from None
        return value


class SamplingConfig(BaseConfig):
    """How completions are sampled, for training and evaluation."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens sampled per model turn. None: as many as fit the context."""

    seed: int | None = None
    """Seed of the sampler. None: every request draws its own."""

    extra_body: dict[str, Any] = {}
    """Further fields of the request, as the server names them."""

    @model_validator(mode="after")
    def _said_once(self) -> Any:
        twice = sorted(set(self.extra_body) & set(type(self).model_fields))
        if twice:
            raise Conflict(
                f"{twice[0]} stands in extra_body and is a key of its own here: the server would get it twice; "
                f"remove it from extra_body and set sampling.{twice[0]}",
                twice[0],
                f"extra_body.{twice[0]}",
            )
        return self


class EnvConfig(BaseConfig):
    """One environment."""

    id: str = "reverse-text"
    """Name of an installed verifiers environment package (`reverse-text` is the module `reverse_text`)."""

    args: dict[str, Any] = {}
    """Arguments of the package's `load_environment`, or the fields of its taskset."""

    api: Literal["auto", "classic", "v1"] = "auto"
    """API of verifiers that the package is written for. auto: classic where it has `load_environment`, else v1."""

    agent: dict[str, Any] = {}
    """Fields of the agents that play a v1 taskset: `harness`, `runtime`, `max_turns` and others. Unset ones are the
    taskset's; the runtime is a subprocess of the worker."""

    name: str | None = None
    """Name in metrics and paths. None: the id."""

    rollout_timeout: float | None = Field(default=None, gt=0)
    """Seconds a rollout of this environment may take, scoring included. None: as for all."""

    score_timeout: float | None = Field(default=None, gt=0)
    """Seconds the reward functions may take for a rollout (for a group, where they look at groups) before it counts as
    failed. None: what is left of the rollout's time."""

    max_memory_gb: float | None = Field(default=None, gt=0)
    """GiB that a worker of this environment, with the processes it starts, may hold; one that holds more is ended, and
    its rollouts are run again. None: no limit."""

    max_cpus: int | None = Field(default=None, ge=1)
    """CPU cores that a worker may use (on Linux). None: all."""

    niceness: int = Field(default=0, ge=0, le=19)
    """How far the workers stand back behind other processes: 0 not at all, 19 the most."""

    @property
    def label(self) -> str:
        """The name in metrics and paths."""
        return self.name or self.id


def check_env_labels(envs: tuple[EnvConfig, ...]) -> None:
    """At least one environment, and no two that share a name in metrics and paths."""
    if not envs:
        raise ValueError("needs at least one environment, which is a table with an id")
    labels = [env.label for env in envs]
    for index, label in enumerate(labels):
        first = labels.index(label)
        if first < index:
            keys = [f"{place}.{'name' if envs[place].name else 'id'}" for place in (first, index)]
            raise Conflict(f"two environments are called {label!r}; give each its own name", *keys)


class SlurmConfig(BaseConfig):
    """Submits the command to a SLURM cluster instead of starting it here."""

    job_name: str = "prime-rl"
    """Name of the job."""

    partition: str = "cluster"
    """Partition that it is submitted to."""


Device = Literal["auto", "cpu", "cuda"]

DEFAULT_OUTPUT_DIR = Path("outputs")


class ProcessConfig(BaseConfig):
    """What every command has: a run directory and a log."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """The run directory."""

    log: SharedLogConfig = Field(default_factory=SharedLogConfig)
