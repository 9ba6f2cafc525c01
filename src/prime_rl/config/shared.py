"""What several processes configure alike: the base class, model, log, client, sampling and environment sections."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


class BaseConfig(BaseModel):
    """Frozen, refuses unknown keys, and every field carries a docstring (unit, meaning of the default)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(BaseConfig):
    """Which model."""

    name: str = DEFAULT_MODEL
    """A local directory in Hugging Face format, or a hub name."""


class LogConfig(BaseConfig):
    """What a process writes to its log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe kind of line that is written."""


class ClientConfig(BaseConfig):
    """How to reach the inference server."""

    base_url: tuple[str, ...] = ("http://localhost:8000/v1",)
    """Address of the OpenAI-compatible API, ending in `/v1`. Several servers come with a later version."""

    timeout: float = Field(default=1200.0, gt=0)
    """Seconds a single request may take."""

    ready_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for the server to come up before the run ends with an error."""

    api_key_var: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the server's bearer key. Unset variable: no key is sent."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_address_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _one_server(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) != 1:
            raise ValueError(f"needs exactly one address, got {len(value)}")
        if not value[0].startswith(("http://", "https://")):
            raise ValueError(f"{value[0]!r} is no address; write it as http://host:port/v1")
        try:
            urlsplit(value[0]).port  # noqa: B018  # it is the look that raises
        except ValueError:
            raise ValueError(f"{value[0]!r} has no valid port; write it as http://host:port/v1") from None
        return value


class SamplingConfig(BaseConfig):
    """How completions are sampled. The training defaults sample from the policy itself, unfiltered."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits before the softmax; the trainer divides by the same value. 0 is greedy (evaluation only)."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens sampled per model turn. None: as many as fit the context."""

    min_tokens: int = Field(default=0, ge=0)
    """No stop token before this many tokens."""

    seed: int | None = None
    """Seed of the sampler. None: every request draws its own."""

    extra_body: dict[str, Any] = {}
    """Further fields of the request, as the server names them."""


class EnvConfig(BaseConfig):
    """One environment."""

    id: str = "reverse-text"
    """Name of an installed verifiers environment package (`reverse-text` is the module `reverse_text`)."""

    args: dict[str, Any] = {}
    """Arguments of the package's `load_environment`, or the fields of its taskset."""

    api: Literal["auto", "classic", "v1"] = "auto"
    """API of verifiers that the package is written for. auto: classic where it has `load_environment`, else v1."""

    name: str | None = None
    """Name in metrics and paths. None: the id."""

    @property
    def label(self) -> str:
        """The name in metrics and paths."""
        return self.name or self.id


def check_env_labels(envs: tuple[EnvConfig, ...]) -> None:
    """At least one environment, and no two that share a name in metrics and paths."""
    if not envs:
        raise ValueError("needs at least one environment: [[orchestrator.env]] with an id")
    labels = [env.label for env in envs]
    double = sorted({label for label in labels if labels.count(label) > 1})
    if double:
        raise ValueError(f"two environments are called {double[0]!r}; give each its own name")


Device = Literal["auto", "cpu", "cuda"]

DEFAULT_OUTPUT_DIR = Path("outputs")
