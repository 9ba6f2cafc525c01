"""A checksum of tensors that trainer and server compute alike, wherever the tensors lie. Integer arithmetic only.

The bytes of a tensor are read as words w_0, w_1, ... (int32; int16 or uint8 where the size is no multiple of 4), and

    checksum = sum_i (w_i + OFFSET) * (2 i + 1)    mod 2^64

Every weight 2 i + 1 is odd, so any change of a single word changes the sum, and so does an exchange of two different
words. It is a proof of delivery against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Final

import numpy as np
import torch
import xxhash
from msgspec.structs import replace
from torch import Tensor

from prime_rl.logs import get_logger
from prime_rl.transport.manifest import TensorEntry

OFFSET: Final = 0x9E3779B1
_CPU_CHUNK: Final = 1 << 17  # words; as 64-bit ones they stay in the processor's cache
_GPU_CHUNK: Final = 1 << 22  # 100 MB of memory beside the tensor, which a server near its limit must have left
_WORDS: Final = {4: torch.int32, 2: torch.int16, 1: torch.uint8}

_logger = get_logger(__name__)


def checksum(tensor: Tensor) -> str:
    """Hex checksum of a tensor's bytes in row-major order; CPU and GPU agree. Waits for the device."""
    return _hex(int(checksum_on_device(tensor)))


def checksum_on_device(tensor: Tensor) -> Tensor:
    """The checksum as an int64 scalar on the tensor's device, so that many can be fetched at once."""
    return checksums_on_device([tensor])[0]


def checksums_on_device(tensors: Sequence[Tensor]) -> Tensor:
    """Checksums of tensors that are all on one device, int64 [n] there; computed on its current stream."""
    assert len({tensor.device for tensor in tensors}) <= 1, "the tensors are on several devices"
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for at, tensor in enumerate(tensors):
        _add(tensor, word_bytes(tensor.nbytes), 0, totals, at)
    return totals


def word_bytes(num_bytes: int) -> int:
    """Bytes of a word in a tensor of so many."""
    return next(size for size in _WORDS if num_bytes % size == 0)


def part_on_device(part: Tensor, *, whole_bytes: int, first_byte: int) -> Tensor:
    """What a contiguous part of a tensor adds to the checksum of the whole: the parts' values, added up mod 2^64.

    The part is of whole words of the whole, which has `whole_bytes`, and begins at its `first_byte`.
    """
    size = word_bytes(whole_bytes)
    assert first_byte % size == part.nbytes % size == 0
    totals = torch.zeros(1, dtype=torch.int64, device=part.device)
    _add(part, size, first_byte // size, totals, 0)
    return totals[0]


def _add(tensor: Tensor, size: int, first: int, totals: Tensor, at: int) -> None:
    """Add to totals[at] the sum over words of `size` bytes of which the first is number `first`."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % size:  # behind a tensor of odd size in one buffer
        flat = flat.clone()
    words = flat.view(_WORDS[size])
    if words.device.type == "cpu":
        totals[at] = _on_cpu(words, first)
    elif words.is_cuda and (kernels := _kernels(words.device)) is not None:
        with torch.cuda.device(words.device):  # Triton launches on the current device's stream, torch on the tensor's
            kernels.add_checksum(words, totals, at, first=first, offset=OFFSET)
    else:
        totals[at] = _on_gpu(words, first)


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The kernels, once a first launch has shown that they compute here; None: PyTorch's own operations do the same.

    That launch waits for the device. Triton, which a process without a GPU need not load, calls a C compiler then.
    """
    try:
        from prime_rl.transport import gpu_checksum  # noqa: PLC0415 (imports Triton)

        words, totals = torch.arange(5, dtype=torch.int32), torch.zeros(2, dtype=torch.int64, device=device)
        with torch.cuda.device(device):
            gpu_checksum.add_checksum(words.to(device), totals, 1, first=3, offset=OFFSET)
        found, expected = totals.tolist(), [0, _on_cpu(words, 3)]
        if found != expected:
            raise RuntimeError(f"its result is {found}, not {expected}")
    except Exception as error:  # noqa: BLE001 (whatever a compiler and a driver raise: nothing depends on them)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        _logger.warning(
            "Checksums are computed by PyTorch's operations, several times slower: Triton fails (%s)", reason
        )
        return None
    return gpu_checksum


def _on_gpu(words: Tensor, first: int = 0) -> Tensor:
    odd = torch.arange(min(_GPU_CHUNK, len(words)), dtype=torch.int64, device=words.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _GPU_CHUNK):
        chunk = words[start : start + _GPU_CHUNK].to(torch.int64).add_(OFFSET)
        total += chunk.sum() * (2 * (first + start))
        total += chunk.mul_(odd[: len(chunk)]).sum()
    return total


def _on_cpu(words: Tensor, first: int = 0) -> int:
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
    return int(np.uint64(total % 2**64).astype(np.int64))


class Tally:
    """Notes tensors as they pass; their devices are waited for once, when the entries are asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[TensorEntry, Tensor]] = {}

    def add(self, name: str, tensor: Tensor, total: Tensor | None = None) -> None:
        """Note a tensor as it is now. `total`: its `checksum_on_device`, where that is known."""
        self._sums[name] = entry(tensor, ""), checksum_on_device(tensor) if total is None else total

    def entries(self) -> dict[str, TensorEntry]:
        """What a manifest says of the tensors, in the order in which they were first noted."""
        values: dict[str, int] = {}
        for names in _by_device({name: total for name, (_, total) in self._sums.items()}):
            sums = torch.stack([self._sums[name][1] for name in names]).tolist()
            values |= zip(names, sums, strict=True)
        return {name: replace(noted, checksum=_hex(values[name])) for name, (noted, _) in self._sums.items()}


def entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """What a manifest says of tensors. Each of their devices is waited for once."""
    totals: dict[str, int] = {}
    for names in _by_device(tensors):
        totals |= zip(names, checksums_on_device([tensors[name] for name in names]).tolist(), strict=True)
    return {name: entry(tensor, _hex(totals[name])) for name, tensor in tensors.items()}


def _by_device(tensors: Mapping[str, Tensor]) -> Collection[list[str]]:
    """The names, in groups of which each is on one device."""
    groups: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(name)
    return groups.values()


def _hex(total: int) -> str:
    return f"{total % 2**64:016x}"


def entry(tensor: Tensor, value: str) -> TensorEntry:
    """What a manifest says of a tensor whose checksum is `value`."""
    return TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), checksum=value)


def combined(tensors: Mapping[str, TensorEntry]) -> str:
    """One digest for all tensors: names, types, shapes and checksums, whatever their order."""
    lines = sorted(f"{name} {e.dtype} {e.shape} {e.checksum}" for name, e in tensors.items())
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
