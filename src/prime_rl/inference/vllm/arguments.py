"""From our configuration to vLLM's arguments: pure functions of plain data; vLLM itself is not imported here.

    InferenceConfig -> arguments() -> {name: value} -> command_line() -> what vLLM's own parser reads

A key of ours has its place in `arguments`; everything else of vLLM's goes through `[inference.vllm]`, by vLLM's own
names, and wins over what we would have said. What the server cannot do without (`FORCED`) is refused there.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prime_rl.config.compat.vllm_flags import LISTS
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.transport.api import MAX_LOGPROBS

GIB: Final = 2**30
CPU_KV_CACHE_BYTES: Final = GIB
"""The embedded engine's size on the CPU; vLLM would take nine tenths of the machine's memory."""

FLOAT32: Final = ("float32", "float")
_ALIASES: Final = {"half": "float16", "float": "float32"}
"""Names that vLLM has for types."""

WORKER_EXTENSION: Final = "prime_rl.inference.vllm.worker.WeightsExtension"
TRANSFER_BACKEND: Final = "prime_rl"
"""The name under which our weight-transfer engine is registered with vLLM."""

FORCED: Final[dict[str, tuple[Any, str]]] = {
    "logprobs_mode": (
        "processed_logprobs",
        "the trainer needs the probability of a token under the distribution that it was drawn from",
    ),
    "generation_config": (
        "vllm",
        "sampling defaults of the model (a top-k, say) would part its logprobs from the trainer's",
    ),
    "worker_extension_cls": (WORKER_EXTENSION, "weights are updated, and proven to have arrived, by it"),
    "weight_transfer_config": ({"backend": TRANSFER_BACKEND}, "weights arrive through it"),
    "api_server_count": (1, "which weights sampled which token is known to one process"),
    "data_parallel_external_lb": (False, "weights are updated in all copies of the model by one server"),
    "data_parallel_hybrid_lb": (False, "weights are updated in all copies of the model by one server"),
    "headless": (False, "a server without an API cannot be told about new weights"),
    "enable_sleep_mode": (False, "weights that are asleep cannot be updated"),
}
"""vLLM arguments that are what they are, and why."""

ELSEWHERE: Final[dict[str, str]] = {
    "host": "server.host",
    "port": "server.port",
    "model": "model.name",
    "api_key": "api_key",
    "scheduler_cls": "kv_cache_on_update",
}
"""vLLM arguments for which there is a key of ours that the rest of the system reads, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a pure function cannot find out: about the model, the machine and the environment."""

    model_dir: str
    on_cpu: bool
    has_cpu_kv_space: bool = False
    """Whether VLLM_CPU_KVCACHE_SPACE says how large the cache is on the CPU."""
    rope_parameters: Mapping[str, Any] | None = None
    """Those of the model's config.json."""


def arguments(config: InferenceConfig, facts: Facts) -> dict[str, Any]:
    """vLLM's arguments by name. Raises: ConfigError for a value of `[inference.vllm]` that the server cannot have."""
    found: dict[str, Any] = {
        "model": facts.model_dir,
        "served_model_name": [config.model.name],
        # More alternatives than the protocol has would be refused by our own client anyway.
        "max_logprobs": MAX_LOGPROBS,
        # What the cache saved is in the answer's usage, as in the embedded engine's.
        "enable_prompt_tokens_details": True,
        # One line a request, in a log that a run writes for days.
        "disable_uvicorn_access_log": True,
        **_model(config, facts),
        **_parallel(config),
        **_cache(config, facts),
        **_lora(config),
        "seed": config.seed,
    }
    for name, value in config.vllm.items():
        _check_given(name, value)
        found[name] = value
    found.update((name, value) for name, (value, _) in FORCED.items() if name not in _OFF_BY_DEFAULT)
    _check_adapters(found, facts)
    return {name: value for name, value in found.items() if value is not None}


_OFF_BY_DEFAULT: Final = frozenset(
    {"data_parallel_external_lb", "data_parallel_hybrid_lb", "headless", "enable_sleep_mode"}
)
"""Forced to what vLLM does anyway; not said, since a version may not know them."""


def _model(config: InferenceConfig, facts: Facts) -> dict[str, Any]:
    model = config.model
    return {
        # A CPU computes bfloat16 slowly, and the trainer there is in float32.
        "dtype": "float32" if model.dtype == "auto" and facts.on_cpu else _gpu_dtype(model.dtype),
        "max_model_len": model.max_model_len,
        "enforce_eager": model.enforce_eager or None,
        "trust_remote_code": getattr(model, "trust_remote_code", False) or None,
        "enable_auto_tool_choice": model.enable_auto_tool_choice or None,
        # vLLM refuses a request with tools unless a parser is named; without automatic choice it has no effect.
        "tool_call_parser": model.tool_call_parser if model.enable_auto_tool_choice else None,
        "reasoning_parser": model.reasoning_parser,
        "hf_overrides": _rope(model.rope_scaling, facts.rope_parameters),
        "enable_return_routed_experts": config.enable_return_routed_experts or None,
    }


def _gpu_dtype(dtype: str) -> str:
    """`auto` is bfloat16 on a GPU, whatever config.json says: the trainer publishes in it."""
    return "bfloat16" if dtype == "auto" else dtype


def _rope(scaling: dict[str, Any] | str | None, own: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Scaling in the form of transformers 5, beside what the model's config.json says (the base, for example)."""
    if scaling is None:
        return None
    if isinstance(scaling, str):
        try:
            scaling = json.loads(scaling)
        except ValueError:
            scaling = None
    if not isinstance(scaling, dict):
        raise ConfigError(
            'model.rope_scaling must be a table as in config.json, {rope_type = "yarn", factor = 4.0, ...} for example'
        )
    given = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    return {"rope_parameters": {**(own or {}), **given}}


def _parallel(config: InferenceConfig) -> dict[str, Any]:
    has_experts = config.enable_expert_parallel or None
    return {
        "tensor_parallel_size": config.parallel.tp,
        "data_parallel_size": config.parallel.dp if config.parallel.dp > 1 else None,
        "enable_expert_parallel": has_experts,
        "all2all_backend": config.all2all_backend if has_experts else None,
        "enable_eplb": config.enable_eplb or None,
    }


def _cache(config: InferenceConfig, facts: Facts) -> dict[str, Any]:
    wanted = None if config.kv_cache_memory_gb is None else int(config.kv_cache_memory_gb * GIB)
    if facts.on_cpu and wanted is None and not facts.has_cpu_kv_space:
        wanted = CPU_KV_CACHE_BYTES
    offload = config.kv_cache_offload
    return {
        "kv_cache_memory_bytes": wanted,
        "gpu_memory_utilization": None if facts.on_cpu else config.gpu_memory_utilization,
        "kv_offloading_size": None if offload is None else offload.cpu.num_bytes / GIB,
        "enable_prefix_caching": config.enable_prefix_caching,
        "block_size": _unless_default(config, "block_size"),
        "max_num_seqs": _unless_default(config, "max_num_seqs"),
        "max_num_batched_tokens": _unless_default(config, "max_num_batched_tokens"),
    }


def _unless_default(config: InferenceConfig, name: str) -> Any:
    """Our default is sized for the embedded engine; vLLM's depends on the device."""
    value = getattr(config, name)
    return None if value == type(config).model_fields[name].default else value


def _lora(config: InferenceConfig) -> dict[str, Any]:
    if not config.enable_lora:
        return {}
    return {
        "enable_lora": True,
        "max_loras": config.max_loras,
        "max_cpu_loras": max(config.max_cpu_loras, config.max_loras),
        "max_lora_rank": config.max_lora_rank or 16,
    }


def _check_adapters(found: Mapping[str, Any], facts: Facts) -> None:
    """vLLM's kernels for adapters on a GPU take 16-bit weights of the model's type; of others, its engine dies."""
    if not found.get("enable_lora") or facts.on_cpu:
        return
    dtype, adapters = found["dtype"], found.get("lora_dtype") or "auto"
    if "auto" not in (dtype, adapters) and _ALIASES.get(adapters, adapters) != _ALIASES.get(dtype, dtype):
        raise ConfigError(
            f"inference.vllm.lora_dtype is {adapters}: on a GPU, vLLM computes adapters in the model's type, which is "
            f"{dtype}; remove the key, or set inference.model.dtype to the same"
        )
    if dtype in FLOAT32:
        raise ConfigError(
            "inference.enable_lora: on a GPU, vLLM serves adapters in bfloat16 or float16 only, and "
            f"inference.model.dtype is {dtype}; set inference.model.dtype = 'bfloat16', or "
            "inference.backend = 'embedded', which serves them in float32"
        )


def _check_given(name: str, value: Any) -> None:
    if name in FORCED and value != FORCED[name][0]:
        forced, why = FORCED[name]
        raise ConfigError(
            f"inference.vllm.{name} = {value!r}: the server needs {forced!r}, because {why}; remove the key"
        )
    if name in ELSEWHERE:
        raise ConfigError(
            f"inference.vllm.{name}: say it as inference.{ELSEWHERE[name]}, which the rest of the run reads"
        )


def check_known(names: Collection[str], known: Collection[str], version: str) -> None:
    """Raise ConfigError for the first name that this version of vLLM does not have, with the nearest that it has."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all` for those there are"
        raise ConfigError(f"inference.vllm.{name}: vLLM {version} has no such argument; {hint}")


def command_line(found: Mapping[str, Any]) -> list[str]:
    """The words that vLLM's parser reads back to these arguments."""
    words: list[str] = []
    for name, value in found.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple) and name in LISTS:
            words += [flag, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
        elif isinstance(value, dict | list | tuple):
            words.append(f"{flag}={json.dumps(value)}")
        else:
            words.append(f"{flag}={value}")
    return words
