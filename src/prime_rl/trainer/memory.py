"""A GPU whose memory is full, in words, and whether a restart would give more of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prime_rl.errors import MemoryFull


@contextmanager
def full_memory_in_words(*, is_final: bool) -> Iterator[None]:
    """Raises: MemoryFull where torch found no more memory on the GPU, with `is_final` of the innermost of these.

    What does not fit into the memory of a run that has just begun - the model, its first step - does not fit after a
    restart either. Later, memory may be in pieces, and have leaked; then a restart may well train the same batch. What
    has been trained before fits: where it does not, somebody else still holds memory, whom waiting may see go.
    """
    try:
        yield
    except Exception as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        raise MemoryFull(
            "the GPU's memory is full. What takes less: a lower model.seq_len; [model.ac], which computes activations "
            "again; model.optimization_dtype = bfloat16; model.optim_cpu_offload; more GPUs. What the steps before "
            f"took is perf/peak_memory_gib in the metrics file. torch said: {error}",
            is_final=is_final,
        ) from error
