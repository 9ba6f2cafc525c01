"""A checksum of tensors that trainer and server compute alike, wherever the tensors lie. Integer arithmetic only.

The bytes of a tensor are read as words w_0, w_1, ... (int32; int16 or uint8 where the size is no multiple of 4), and

    checksum = sum_i (w_i + OFFSET) * (2 i + 1)    mod 2^64

Every weight 2 i + 1 is odd, so any change of a single word changes the sum, and so does an exchange of two different
words. It is a proof of delivery against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import xxhash
from torch import Tensor

from prime_rl.transport.manifest import TensorEntry

OFFSET: Final = 0x9E3779B1
_CHUNK_WORDS: Final = 1 << 24
_WORDS: Final = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def checksum(tensor: Tensor) -> str:
    """Hex checksum of a tensor's bytes in row-major order; CPU and GPU agree. Waits for the device."""
    return f"{int(checksum_on_device(tensor)) % 2**64:016x}"


def checksum_on_device(tensor: Tensor) -> Tensor:
    """The checksum as an int64 scalar on the tensor's device, so that many can be fetched at once."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    size = next(size for size in _WORDS if flat.numel() % size == 0)
    words = flat.view(_WORDS[size])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64) + OFFSET
        odd = torch.arange(2 * start + 1, 2 * (start + chunk.numel()) + 1, 2, dtype=torch.int64, device=tensor.device)
        total += (chunk * odd).sum()
    return total


def entry(tensor: Tensor) -> TensorEntry:
    """What a manifest says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(dtype=dtype, shape=list(tensor.shape), checksum=checksum(tensor))


def combined(tensors: Mapping[str, TensorEntry]) -> str:
    """One digest for all tensors: names, types, shapes and checksums, whatever their order."""
    lines = sorted(f"{name} {e.dtype} {e.shape} {e.checksum}" for name, e in tensors.items())
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
