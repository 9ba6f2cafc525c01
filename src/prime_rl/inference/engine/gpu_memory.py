"""How much of a GPU the engine takes, and that it takes no more.

`gpu_memory_utilization` is a share of the GPU's total memory for the whole process, so that two processes whose shares
sum to less than 1 can share a GPU whichever starts first. PyTorch's allocator enforces it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from prime_rl.errors import ConfigError

GIB = 1024**3
OUTSIDE_BYTES = 1 * GIB
"""What a process takes outside of the allocator: the CUDA context, loaded kernels, captured graphs."""
HEADROOM_BYTES = GIB // 2
"""What is left to the allocator for whatever is not allocated at the start: edits of logits, cuBLAS, fragments."""


def limit_memory(device: torch.device, utilization: float) -> int:
    """Hold this process to a share of the GPU; returns how many bytes the allocator may hand out.

    Raises: ConfigError when less than that is free.
    """
    gc.collect()  # an earlier engine of this process lies in cycles until then
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    budget = int(total * utilization)
    if free < budget - OUTSIDE_BYTES:
        raise ConfigError(
            f"inference.gpu_memory_utilization = {utilization} of {total / GIB:.1f} GiB are {budget / GIB:.1f} GiB, "
            f"and {free / GIB:.1f} GiB of the GPU are free; lower it, or stop what else uses the GPU"
        )
    allocator = budget - OUTSIDE_BYTES
    if allocator <= HEADROOM_BYTES:
        raise ConfigError(
            f"inference.gpu_memory_utilization = {utilization} leaves {budget / GIB:.2f} GiB, less than the "
            f"{(OUTSIDE_BYTES + HEADROOM_BYTES) / GIB:.1f} GiB that any server needs; raise it"
        )
    torch.cuda.set_per_process_memory_fraction(allocator / total, device)
    return allocator


def cache_bytes(device: torch.device, allocator: int, utilization: float) -> int:
    """What is left for the KV cache once weights and workspace are allocated. Raises: ConfigError when nothing is."""
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    left = allocator - held - HEADROOM_BYTES
    if left <= 0:
        raise ConfigError(
            f"weights and workspace take {held / GIB:.1f} GiB, and inference.gpu_memory_utilization = {utilization} "
            "leaves nothing beside them for the KV cache; raise it, or lower inference.max_num_seqs or "
            "inference.max_num_batched_tokens"
        )
    return left


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn running out of memory into a sentence that says which key to change. Raises: ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out while {doing}: raise inference.gpu_memory_utilization where it has room, or "
            "lower inference.max_num_seqs, inference.max_num_batched_tokens or inference.kv_cache_memory_gb "
            f"({str(error).splitlines()[0]})"
        ) from error
