"""From configuration to a running engine: model, cache size, scheduler."""

import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.engine.cache import BlockCache
from prime_rl.inference.engine.engine import Engine
from prime_rl.inference.engine.runner import CpuRunner
from prime_rl.inference.engine.scheduler import Scheduler
from prime_rl.logs import get_logger
from prime_rl.models.attention import PagedCache
from prime_rl.models.decoder import DecoderConfig
from prime_rl.models.hf import eos_token_ids, load_decoder, resolve_model
from prime_rl.models.native import has_bfloat16_arithmetic, load_kernels

logger = get_logger(__name__)

GIB = 1024**3
CPU_CACHE_GIB = 1.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: InferenceConfig) -> Engine:
    """Load the model and start the engine's thread.

    Raises: ModelError for a model that cannot be used, ConfigError for settings that do not fit it or this machine.
    """
    device = _device(config.device)
    dtype = _dtype(config.model.dtype, device)
    directory = resolve_model(config.model.name)
    decoder = load_decoder(str(directory), device=device, dtype=_compute_dtype(dtype, device), seed=config.seed)
    decoder.eval().requires_grad_(False)
    shape = decoder.config
    num_blocks, max_model_len = _cache_size(config, shape, dtype, device, _max_model_len(config, shape))
    runner = CpuRunner(
        decoder,
        PagedCache.allocate(
            (shape.num_layers, num_blocks, shape.num_kv_heads, shape.head_dim), config.block_size, dtype, device
        ),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        kernels=load_kernels() if device.type == "cpu" else None,
    )
    scheduler = Scheduler(
        BlockCache(num_blocks, config.block_size, sharing=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    logger.info(
        "engine: %s on %s in %s, %d KV blocks of %d tokens, at most %d tokens a request",
        config.model.name,
        device,
        str(dtype).removeprefix("torch."),
        num_blocks,
        config.block_size,
        max_model_len,
    )
    return Engine(runner, scheduler, eos_token_ids=eos_token_ids(directory), seed=config.seed)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("inference.device is 'cuda', and no CUDA device is visible; use 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name == "float16" and device.type == "cpu":
        raise ConfigError("inference.model.dtype float16 is for GPUs; use 'bfloat16' or 'float32' on the CPU")
    return DTYPES[name]


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; the KV cache always has the configured one."""
    if dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16_arithmetic():
        logger.info(
            "the KV cache is bfloat16; weights and activations are float32 (no bfloat16 arithmetic on this CPU)"
        )
        return torch.float32
    return dtype


def _max_model_len(config: InferenceConfig, shape: DecoderConfig) -> int:
    """The longest request: what was asked for, or what the model has positions for where that is less."""
    asked = config.model.max_model_len
    if asked is not None and asked > shape.max_positions:
        logger.warning(
            "max_model_len is %d, but %s has %d positions; requests are limited to these",
            asked, config.model.name, shape.max_positions,
        )  # fmt: skip
    return min(asked or shape.max_positions, shape.max_positions)


def _cache_size(
    config: InferenceConfig, shape: DecoderConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> tuple[int, int]:
    """Number of blocks, and the longest request that they can hold."""
    if config.kv_cache_memory_gb is not None:
        budget = config.kv_cache_memory_gb * GIB
    elif device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * config.gpu_memory_utilization
    else:
        budget = CPU_CACHE_GIB * GIB
    block_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * config.block_size * dtype.itemsize
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)  # more could never be used but for sharing
    num_blocks = min(int(budget // block_bytes), wanted)
    capacity = num_blocks * config.block_size
    if capacity < 2:
        raise ConfigError(
            f"inference.kv_cache_memory_gb leaves no room for a block of {config.block_size} tokens "
            f"({block_bytes / GIB:.4f} GiB); raise it"
        )
    if capacity < max_model_len:
        if config.model.max_model_len == max_model_len:
            raise ConfigError(
                f"inference.model.max_model_len is {max_model_len}, but the KV cache holds {capacity} tokens; "
                "raise inference.kv_cache_memory_gb or lower max_model_len"
            )
        logger.warning("the KV cache holds %d tokens; requests are limited to that", capacity)
    return num_blocks, min(max_model_len, capacity)
