"""A checksum of tensors that trainer and server compute alike, wherever the tensors lie. Integer arithmetic only.

The bytes of a tensor are read as words w_0, w_1, ... (int32; int16 or uint8 where the size is no multiple of 4), and

    checksum = sum_i (w_i + OFFSET) * (2 i + 1)    mod 2^64

Every weight 2 i + 1 is odd, so any change of a single word changes the sum, and so does an exchange of two different
words. It is a proof of delivery against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import xxhash
from msgspec.structs import replace
from torch import Tensor

from prime_rl.transport.manifest import TensorEntry

OFFSET: Final = 0x9E3779B1
_CPU_CHUNK: Final = 1 << 17  # words; as 64-bit ones they stay in the processor's cache
_GPU_CHUNK: Final = 1 << 22  # 100 MB of memory beside the tensor, which a server near its limit must have left
_WORDS: Final = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def checksum(tensor: Tensor) -> str:
    """Hex checksum of a tensor's bytes in row-major order; CPU and GPU agree. Waits for the device."""
    return f"{int(checksum_on_device(tensor)) % 2**64:016x}"


def checksum_on_device(tensor: Tensor) -> Tensor:
    """The checksum as an int64 scalar on the tensor's device, so that many can be fetched at once."""
    return _sum_of(tensor, word_bytes(tensor.nbytes), 0)


def word_bytes(num_bytes: int) -> int:
    """Bytes of a word in a tensor of so many."""
    return next(size for size in _WORDS if num_bytes % size == 0)


def part_on_device(part: Tensor, *, whole_bytes: int, first_byte: int) -> Tensor:
    """What a contiguous part of a tensor adds to the checksum of the whole: the parts' values, added up mod 2^64.

    The part is of whole words of the whole, which has `whole_bytes`, and begins at its `first_byte`.
    """
    size = word_bytes(whole_bytes)
    assert first_byte % size == part.nbytes % size == 0
    return _sum_of(part, size, first_byte // size)


def _sum_of(tensor: Tensor, size: int, first: int) -> Tensor:
    """The sum over words of `size` bytes of which the first is number `first`."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % size:  # behind a tensor of odd size in one buffer
        flat = flat.clone()
    words = flat.view(_WORDS[size])
    return _on_cpu(words, first) if words.device.type == "cpu" else _on_gpu(words, first)


def _on_gpu(words: Tensor, first: int = 0) -> Tensor:
    odd = torch.arange(min(_GPU_CHUNK, len(words)), dtype=torch.int64, device=words.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _GPU_CHUNK):
        chunk = words[start : start + _GPU_CHUNK].to(torch.int64).add_(OFFSET)
        total += chunk.sum() * (2 * (first + start))
        total += chunk.mul_(odd[: len(chunk)]).sum()
    return total


def _on_cpu(words: Tensor, first: int = 0) -> Tensor:
    """With numpy, in one thread: torch starts all its threads for every chunk, which on busy cores takes seconds."""
    values = words.numpy()
    odd = np.arange(1, 2 * _CPU_CHUNK, 2, dtype=np.int64)
    buffer = np.empty(_CPU_CHUNK, dtype=np.int64)
    total = 0
    for start in range(0, len(values), _CPU_CHUNK):
        chunk = buffer[: min(_CPU_CHUNK, len(values) - start)]
        np.add(values[start : start + _CPU_CHUNK], np.int64(OFFSET), out=chunk, dtype=np.int64)
        total += int(chunk.sum()) * 2 * (first + start)
        total += int(np.multiply(chunk, odd[: len(chunk)], out=chunk).sum())
    return torch.tensor(np.uint64(total % 2**64).astype(np.int64))


class Tally:
    """Notes tensors as they pass; their device is waited for once, when the entries are asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[TensorEntry, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor as it is now."""
        self._sums[name] = entry(tensor, ""), checksum_on_device(tensor)

    def entries(self) -> dict[str, TensorEntry]:
        """What a manifest says of the tensors, in the order in which they were first noted."""
        if not self._sums:
            return {}
        sums = torch.stack([total for _, total in self._sums.values()]).tolist()
        pairs = zip(self._sums.items(), sums, strict=True)
        return {name: replace(noted, checksum=f"{value % 2**64:016x}") for (name, (noted, _)), value in pairs}


def entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """What a manifest says of tensors of one device."""
    tally = Tally()
    for name, tensor in tensors.items():
        tally.add(name, tensor)
    return tally.entries()


def entry(tensor: Tensor, value: str) -> TensorEntry:
    """What a manifest says of a tensor whose checksum is `value`."""
    return TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), checksum=value)


def combined(tensors: Mapping[str, TensorEntry]) -> str:
    """One digest for all tensors: names, types, shapes and checksums, whatever their order."""
    lines = sorted(f"{name} {e.dtype} {e.shape} {e.checksum}" for name, e in tensors.items())
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
