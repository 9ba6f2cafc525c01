"""From configuration to a running engine: model, cache size, scheduler."""

from importlib.util import find_spec
from pathlib import Path

import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.engine.cache import BlockCache
from prime_rl.inference.engine.engine import Engine
from prime_rl.inference.engine.gpu_memory import cache_bytes, explained, limit_memory
from prime_rl.inference.engine.runner import CpuRunner, Runner
from prime_rl.inference.engine.scheduler import Scheduler
from prime_rl.logs import get_logger
from prime_rl.models.attention import PagedCache
from prime_rl.models.decoder import Decoder, DecoderConfig
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
    build = _cpu_runner if device.type == "cpu" else _gpu_runner
    if config.deterministic and device.type != "cpu":
        raise ConfigError(
            "inference.deterministic is held on the CPU alone, where every token is computed by itself: on a GPU its "
            "numbers depend on what is computed beside it; set inference.device to 'cpu', or leave deterministic out"
        )
    runner, num_blocks, max_model_len = build(config, directory, dtype, device)
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
    return Engine(
        runner,
        scheduler,
        eos_token_ids=eos_token_ids(directory),
        seed=config.seed,
        deterministic=config.deterministic,
    )


def _cpu_runner(
    config: InferenceConfig, directory: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Runner, int, int]:
    """The runner, the number of its blocks, and the longest request."""
    compute_dtype = torch.float32 if config.deterministic else _compute_dtype(dtype, device)
    decoder = _decoder(config, directory, compute_dtype, device)
    shape = decoder.config
    max_model_len = _max_model_len(config, shape)
    num_blocks, max_model_len = _cache_size(config, shape, dtype, CPU_CACHE_GIB * GIB, max_model_len)
    runner = CpuRunner(
        decoder,
        PagedCache.allocate(
            (shape.num_layers, num_blocks, shape.num_kv_heads, shape.head_dim), config.block_size, dtype
        ),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        kernels=load_kernels(),
        deterministic=config.deterministic,
    )
    return runner, num_blocks, max_model_len


def _gpu_runner(
    config: InferenceConfig, directory: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Runner, int, int]:
    """Likewise. The cache takes what is left once everything else is in place."""
    if find_spec("triton") is None:
        raise ConfigError(
            "inference.device is cuda, and Triton, in which the engine's kernels are written, is not installed here; "
            "install it (PyTorch for CUDA on Linux brings it), or set inference.backend to 'vllm' or device to 'cpu'"
        )
    from prime_rl.inference.engine.gpu_runner import GpuRunner  # noqa: PLC0415 (Triton is only where a GPU is)
    from prime_rl.models.gpu_attention import GpuCache  # noqa: PLC0415

    utilization = config.gpu_memory_utilization
    allocator = limit_memory(device, utilization)
    with explained("loading the model"):
        decoder = _decoder(config, directory, dtype, device)
        shape = decoder.config
        max_model_len = _max_model_len(config, shape)
        runner = GpuRunner(
            decoder,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )
    budget = cache_bytes(device, allocator, utilization)
    num_blocks, max_model_len = _cache_size(config, shape, dtype, budget, max_model_len)
    sizes = (shape.num_layers, num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim)  # one is scratch
    with explained("allocating the KV cache and capturing CUDA graphs"):
        runner.attach(GpuCache.allocate(sizes, dtype, device), eager=config.model.enforce_eager)
    return runner, num_blocks, max_model_len


def _decoder(config: InferenceConfig, directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    decoder = load_decoder(str(directory), device=device, dtype=dtype, seed=config.seed)
    return decoder.eval().requires_grad_(False)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("inference.device is 'cuda', and no CUDA device is visible; use 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


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
    config: InferenceConfig, shape: DecoderConfig, dtype: torch.dtype, budget: float, max_model_len: int
) -> tuple[int, int]:
    """Number of blocks, and the longest request that they can hold, in `budget` bytes where the user chose no size."""
    if config.kv_cache_memory_gb is not None:
        budget = config.kv_cache_memory_gb * GIB
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
