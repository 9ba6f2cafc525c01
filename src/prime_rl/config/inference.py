"""The inference server's configuration. Engine keys have the names of vLLM's flags where they mean the same."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from prime_rl.config.shared import DEFAULT_OUTPUT_DIR, BaseConfig, Device, LogConfig, ModelConfig


class ServerConfig(BaseConfig):
    """Where the server listens."""

    host: str | None = None
    """Address to bind. None: loopback without an API key, all interfaces with one."""

    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port. 0: a free one, named in the log."""


class InferenceModelConfig(ModelConfig):
    """The model that is served."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations. auto: float32 on CPU, bfloat16 on a GPU."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together. None: what the model's config.json allows."""


class InferenceConfig(BaseConfig):
    """`inference`: serves the current policy over an OpenAI-compatible API."""

    backend: Literal["auto", "embedded", "vllm"] = "auto"
    """`embedded` is our own engine (CPU or one GPU). auto: vLLM where it is installed and a GPU is visible."""

    device: Device = "auto"
    """Where the embedded engine computes. auto: the first visible GPU, else the CPU."""

    server: ServerConfig = ServerConfig()
    model: InferenceModelConfig = InferenceModelConfig()

    block_size: int = Field(default=16, ge=1)
    """Tokens of one block of the KV cache; whole blocks are shared between requests with the same prefix."""

    kv_cache_memory_gb: float | None = Field(default=None, gt=0)
    """GiB of memory for the KV cache. None: 1 on CPU, `gpu_memory_utilization` of what is free on a GPU."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's free memory that the KV cache may take when `kv_cache_memory_gb` is not set."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most requests that decode at the same time; further ones wait."""

    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Most tokens computed in one engine step; longer prompts are computed in pieces."""

    enable_prefix_caching: bool = True
    """Whether prompts share the KV blocks of a common beginning (a group's prompt is computed once)."""

    seed: int = 42
    """Seeds sampling of requests without a seed of their own, and weights that are initialised."""

    api_key: str | None = None
    """Bearer key that every route but `/health` asks for. None: none is asked for, and only loopback is served."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """The run directory (logs)."""

    log: LogConfig = LogConfig()
