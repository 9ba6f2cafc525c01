"""Where metrics go besides the run's own JSONL files, and what tells the outside that a process lives."""

from pathlib import Path

from pydantic import Field

from prime_rl.config.shared import BaseConfig


class TrainerLogExtrasConfig(BaseConfig):
    """What is logged besides scalars. (Samples are the orchestrator's.)"""

    distributions: bool = True
    """Whether distributions (entropy, mismatch, ...) are logged."""

    interval: int = Field(default=10, ge=1)
    """Steps between two such logs."""


class LogExtrasConfig(TrainerLogExtrasConfig):
    """What is logged besides scalars."""

    samples: bool = True
    """Whether a table of rollouts (prompt, completion, reward, advantage) is logged."""


class SharedWandbConfig(BaseConfig):
    """Weights & Biases, for trainer and orchestrator at once: two runs, named `-trainer` and `-orchestrator`."""

    project: str = "prime-rl"
    """Project that the runs belong to."""

    name: str | None = None
    """Name of the run. None: W&B makes one up."""

    offline: bool = False
    """Whether the run is only written to `dir`, to be uploaded later with `wandb sync`."""

    dir: Path | None = None
    """Directory of W&B's own files. None: `logs` in the run directory."""


class WandbConfig(SharedWandbConfig):
    """Weights & Biases."""

    id: str | None = None
    """Id of an existing run to go on with. None: a new run."""


class TrainerWandbConfig(WandbConfig):
    """Weights & Biases."""

    log_extras: TrainerLogExtrasConfig | None = Field(default_factory=TrainerLogExtrasConfig)


class OrchestratorWandbConfig(WandbConfig):
    """Weights & Biases."""

    log_extras: LogExtrasConfig | None = Field(default_factory=LogExtrasConfig)


class PrimeMonitorConfig(BaseConfig):
    """Prime Intellect's own monitoring service."""

    base_url: str = "https://api.primeintellect.ai/api/internal/rft"
    """Address of the service."""

    api_key_var: str = "PRIME_API_KEY"
    """Name of the environment variable that holds its key."""

    log_extras: LogExtrasConfig | None = Field(default_factory=LogExtrasConfig)


class HeartbeatConfig(BaseConfig):
    """A sign of life after every step."""

    url: str
    """Address that is asked for (GET) after every step."""


class MetricsServerConfig(BaseConfig):
    """Prometheus metrics of this process over HTTP."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port."""

    host: str = "0.0.0.0"
    """Address to bind."""
