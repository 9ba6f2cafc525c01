"""The inference server's configuration. Engine keys have the names of vLLM's flags where they mean the same."""

import ipaddress
from typing import Any, Literal

from pydantic import Field, model_validator

from prime_rl.config.artifacts import SharedWeightBroadcastConfig
from prime_rl.config.conflict import Conflict
from prime_rl.config.shared import BaseConfig, Device, ModelConfig, ProcessConfig

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for."""


class ServerConfig(BaseConfig):
    """Where the server listens."""

    host: str | None = None
    """Address to bind. None: loopback without an API key, all interfaces with one."""

    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port. 0: a free one, named in the log."""

    @property
    def is_loopback(self) -> bool:
        """Whether the host that was given can be reached from this machine alone."""
        try:
            return self.host is not None and ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class InferenceModelConfig(ModelConfig):
    """The model that is served."""

    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run, in vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations. auto: float32 on CPU, bfloat16 on a GPU."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together. None: the model's positions (with `rl`: `seq_len`)."""

    enforce_eager: bool = False
    """Whether decoding runs without CUDA graphs: it starts faster and runs slower."""

    enable_auto_tool_choice: bool = False
    """Whether tool calls are parsed from what the model writes."""

    tool_call_parser: str = "hermes"
    """How the model writes tool calls, as vLLM names it. The embedded engine knows `hermes`."""

    reasoning_parser: str | None = None
    """How the model marks its reasoning, as vLLM names it. None: reasoning stays in the text."""

    rope_scaling: dict[str, Any] | str | None = None
    """Scaling of the rotary embedding, as in config.json. None: the model's own."""


class ParallelConfig(BaseConfig):
    """How the server is spread over GPUs."""

    tp: int = Field(default=1, ge=1)
    """GPUs that share each matrix multiplication."""

    dp: int = Field(default=1, ge=1)
    """Copies of the model; with `rl` it follows from `inference_gpu_ids` and `tp`."""


class CPUOffloadConfig(BaseConfig):
    """KV blocks in the host's memory."""

    num_bytes: int = Field(default=4 * 2**30, gt=0)
    """Bytes that they may take."""


class KVCacheOffloadConfig(BaseConfig):
    """Keeps KV blocks for which the GPU has no room, instead of computing them anew."""

    cpu: CPUOffloadConfig = Field(default_factory=CPUOffloadConfig)


class InferenceDeploymentConfig(BaseConfig):
    """The machines that serve."""

    type: Literal["single_node", "multi_node", "disaggregated"] = "single_node"
    """multi_node: servers on several machines. disaggregated: prompts and completions are computed on machines of their
    own, behind a router."""

    num_nodes: int = Field(default=2, ge=1)
    """Machines with `type = "multi_node"`."""

    num_prefill_nodes: int = Field(default=1, ge=1)
    """Machines for prompts with `type = "disaggregated"`."""

    num_decode_nodes: int = Field(default=1, ge=1)
    """Machines for completions with `type = "disaggregated"`."""


class InferenceConfig(ProcessConfig):
    """`inference`: serves the current policy over an OpenAI-compatible API."""

    backend: Literal["auto", "embedded", "vllm"] = "auto"
    """`embedded` is our own engine (CPU or one GPU). auto: vLLM where it is installed and a GPU is visible."""

    device: Device = "auto"
    """Where the embedded engine computes. auto: the first visible GPU, else the CPU."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    model: InferenceModelConfig = Field(default_factory=InferenceModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    deployment: InferenceDeploymentConfig = Field(default_factory=InferenceDeploymentConfig)
    kv_cache_offload: KVCacheOffloadConfig | None = None
    weight_broadcast: SharedWeightBroadcastConfig = Field(default_factory=SharedWeightBroadcastConfig)

    block_size: int = Field(default=16, ge=1)
    """Tokens of one block of the KV cache; whole blocks are shared between requests with the same prefix."""

    kv_cache_memory_gb: float | None = Field(default=None, gt=0)
    """GiB of memory for the KV cache. None: 1 on CPU; on a GPU what `gpu_memory_utilization` leaves after weights and
    workspace."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's total memory that the whole server may use: weights, CUDA graphs, workspace and KV cache."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most requests that decode at the same time; further ones wait. vLLM has a default of its own, used where this is
    left at ours."""

    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Most tokens computed in one engine step; longer prompts are computed in pieces. vLLM has a default of its own,
    used where this is left at ours."""

    enable_prefix_caching: bool = True
    """Whether prompts share the KV blocks of a common beginning (a group's prompt is computed once)."""

    kv_cache_on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of running requests when weights are updated: they go on with what the older weights
    computed, or compute it anew. Either way, no later request is given what older weights computed. With
    `kv_cache_offload` it is recompute, and keep is refused: blocks that were offloaded are found again by their tokens,
    whatever weights computed them."""

    enable_lora: bool = False
    """Whether adapters can be loaded; with `rl` it follows from `trainer.model.lora`."""

    max_loras: int = Field(default=8, ge=1)
    """Most adapters in one batch."""

    max_cpu_loras: int = Field(default=100, ge=1)
    """Most adapters that are kept in memory."""

    max_lora_rank: int | None = Field(default=None, ge=1, le=LORA_RANKS[-1])
    """Highest rank of an adapter: one that vLLM has kernels for. None: 16."""

    enable_expert_parallel: bool = False
    """Whether each GPU holds some of the experts whole, instead of a slice of every expert."""

    all2all_backend: str = "allgather_reducescatter"
    """What carries tokens to their experts on other GPUs, as vLLM names it (of DeepEP or FlashInfer, for example)."""

    enable_eplb: bool = False
    """Whether experts move between GPUs so that all have as much to do."""

    enable_return_routed_experts: bool = False
    """Whether a completion says which experts each token took, for the trainer's `enable_router_replay`."""

    api_server_count: int = Field(default=1, ge=1)
    """Processes of vLLM that answer HTTP. Only 1: which weights sampled which tokens is known to one process."""

    vllm: dict[str, Any] = {}
    """vLLM's own arguments by their names (`quantization = "fp8"`); flags that are no key of ours go here."""

    router: bool = False
    """Whether `vllm-router` stands in front of the servers that `rl` starts, at `server.port`; the servers listen on
    the ports after it."""

    seed: int = 42
    """Seeds sampling of requests without a seed of their own, and weights that are initialised."""

    deterministic: bool = False
    """Whether a request's tokens and logprobs depend on weights and request alone, to the last bit: not on what runs
    beside it, nor on how its prompt was cut or cached. For the embedded engine on the CPU; slower."""

    api_key: str | None = None
    """Bearer key that every route but `/health` asks for. None: none is asked for, and only loopback is served."""

    @model_validator(mode="before")
    @classmethod
    def _offloaded_cache(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("kv_cache_offload") in (None, "None"):
            return given
        if given.get("kv_cache_on_update", "recompute") == "keep":
            raise Conflict(
                "kv_cache_offload needs kv_cache_on_update = 'recompute': offloaded blocks cannot be kept apart from "
                "those of newer weights; leave one of them out",
                "kv_cache_on_update",
            )
        return given | {"kv_cache_on_update": "recompute"}

    @model_validator(mode="after")
    def _deterministic(self) -> Any:
        if self.deterministic and self.backend == "vllm":
            raise Conflict(
                "deterministic is held by the embedded engine alone: vLLM's numbers depend on what is computed beside "
                "a request; set backend to 'embedded', or leave deterministic out",
                "deterministic",
                "backend",
            )
        if self.deterministic and self.device == "cuda":
            raise Conflict(
                "deterministic is held on the CPU alone: set device to 'cpu', or leave deterministic out",
                "deterministic",
                "device",
            )
        return self

    @model_validator(mode="after")
    def _lora(self) -> Any:
        if self.max_lora_rank is not None and self.max_lora_rank not in LORA_RANKS:
            above = next(rank for rank in LORA_RANKS if rank > self.max_lora_rank)
            ranks = ", ".join(map(str, LORA_RANKS))
            raise Conflict(f"max_lora_rank must be one of {ranks}; the next is {above}", "max_lora_rank")
        if self.api_server_count > 1:
            raise Conflict(
                "weights are updated in one API server: set api_server_count to 1; "
                "for more throughput, start several servers",
                "api_server_count",
            )
        return self
