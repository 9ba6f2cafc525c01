"""Tensors on their way to the host's memory. A GPU goes on computing meanwhile:

    current stream   optimizer step n | group 1 packed | group 2 packed | forward, backward, optimizer step n + 1
    copy stream                                        | group 1: checksums, to the host | group 2: ...

Packing is a copy within the GPU's memory, over in a millisecond. It is enqueued between two optimizer steps on their
own stream, so what is packed is of that moment.
"""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor

from prime_rl.logs import get_logger
from prime_rl.models.hf import in_groups
from prime_rl.transport.checksum import checksums_on_device

GROUP_BYTES: Final = 2**28
"""Of a GPU's tensors that go to the host as one copy. A power of two, as torch rounds pinned memory up to one."""
STAGED_BYTES: Final = 2**31
"""Of packed groups in the GPU's memory. Of a model of more bytes its computing waits for the rest to be copied, which
leaves the GPU at some 50 GB/s."""
STAGED_SHARE: Final = 4
"""Of the GPU's memory that is free, packed groups take a fourth at most."""
ALIGNMENT: Final = 16
"""Bytes: where a packed tensor begins, so that words of any size can be read from there."""

_logger = get_logger(__name__)

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Tensors on the host, once `arrived`; with their checksums where the GPU has computed them."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    num_bytes: int
    totals: Tensor | None = None
    arrived: Any = None
    """torch.cuda.Event; None where there is nothing to wait for."""


def lots(tensors: Iterable[Named]) -> Generator[Lot]:
    """A GPU's tensors on their way to the host, in groups; others as they are, one by one."""
    with closing(_Staging()) as staging:
        for (device, _), run in groupby(tensors, key=lambda pair: (pair[1].device, pair[1].dtype)):
            is_on_gpu = device.type == "cuda"
            for group in in_groups(run, lambda pair: padded_bytes(pair[1]), GROUP_BYTES if is_on_gpu else 0):
                names, members = zip(*group, strict=True)
                if is_on_gpu:
                    yield staging.copied(names, members)
                else:
                    yield Lot(names=names, tensors=members, num_bytes=sum(tensor.nbytes for tensor in members))


class _Staging:
    """Packed groups in a GPU's memory, each until the copy stream has taken it to the host. To be closed."""

    def __init__(self) -> None:
        self._staged: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._num_bytes = 0
        self._limit_bytes: int | None = None

    def copied(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Lot:
        """Copies of tensors of one dtype on one GPU, which may be changed by what its current stream does next."""
        device, dtype = tensors[0].device, tensors[0].dtype
        sizes = [padded_bytes(tensor) // dtype.itemsize for tensor in tensors]
        current, beside = torch.cuda.current_stream(device), _copy_stream(device)
        if self._limit_bytes is None:
            self._limit_bytes = min(STAGED_BYTES, _free_bytes(device) // STAGED_SHARE)
        self._make_room(self._limit_bytes - sum(sizes) * dtype.itemsize, current)
        staged = torch.empty(sum(sizes), dtype=dtype, device=device)
        packed = pieces(staged, sizes, tensors)
        torch._foreach_copy_(packed, list(tensors))
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            totals, host = on_host(checksums_on_device(packed)), on_host(staged)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(beside)
        self._staged.append((arrived, staged))
        self._num_bytes += staged.nbytes
        copies = pieces(host, sizes, tensors)
        return Lot(names=names, tensors=copies, num_bytes=staged.nbytes, totals=totals, arrived=arrived)

    def _make_room(self, most_bytes: int, current: torch.cuda.Stream) -> None:
        """Let go of the oldest groups until no more than so many bytes are staged."""
        while self._staged and self._num_bytes > most_bytes:
            arrived, staged = self._staged.popleft()
            current.wait_event(arrived)  # whatever that stream puts into this memory next comes after the copy
            self._num_bytes -= staged.nbytes

    def close(self) -> None:
        """Leave what is still on its way to torch's allocator, which gives nobody the memory before it has arrived.

        A forward that finds no memory waits for that: the allocator does so before it says that there is none.
        """
        for _, staged in self._staged:
            staged.record_stream(_copy_stream(staged.device))
        self._staged.clear()


def _free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, what nobody uses: the GPU's own, and what torch's allocator keeps for later."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same one every time: torch's allocator keeps a pool of memory for each stream that it has ever seen."""
    return torch.cuda.Stream(device)


def padded_bytes(tensor: Tensor) -> int:
    """What a tensor takes in a buffer in which each begins at a multiple of ALIGNMENT."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def pieces(buffer: Tensor, sizes: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, contiguous and of the shapes of `tensors`, one after the other; `sizes`: what each takes."""
    parts = buffer.split(sizes)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def on_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the stream comes to it. torch uses the memory again when it is dropped."""
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # to other memory no GPU copies alone
    except RuntimeError as error:
        _tell_of_pinning(str(error).partition("\n")[0])
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return host.copy_(tensor, non_blocking=True)


@cache
def _tell_of_pinning(reason: str) -> None:
    """Once for each reason."""
    _logger.warning(
        "No page-locked memory is to be had for weights (%s): they are copied into ordinary memory, and training waits "
        "for that; see `ulimit -l` and the memory that is free",
        reason,
    )
