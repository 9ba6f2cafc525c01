"""The tensors of a model for whoever publishes them, wherever they lie: whole, or each rank with a part.

    rank 0   iterates `gathering`: tells "gather 7 8 9" --control group--> the others gather 7, 8 and 9 with it
             `checksums`:          tells "checksums"    -----------------> the others sum over their parts
             `wait`:               tells "wait"         -----------------> the others wait for the next word
             `end`:                tells "end"          -----------------> the others leave `follow`

Nobody is in a collective that rank 0 has not asked for just now. So rank 0 may wait for a disk for as long as it likes,
for a server as long as `trainer.build.patience` says, or give up in the middle, and no rank ever holds more than a few
whole tensors. On a CPU a whole tensor is a copy, which stays as it is when training goes on; on a GPU it may be the
model's own.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Self

import torch
from torch import Tensor

from prime_rl.errors import InferenceError
from prime_rl.models.hf import in_groups
from prime_rl.models.slices import held_rows, in_slices
from prime_rl.trainer.ranks import Ranks
from prime_rl.transport.checksum import checksum_on_device, entry, part_on_device, word_bytes
from prime_rl.transport.manifest import TensorEntry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHUNK_BYTES: Final = 2**28
"""Tensors of so many bytes are gathered at one word; a single larger one at a word of its own."""

_END: Final = "end"
_GATHER: Final = "gather"
_CHECKSUMS: Final = "checksums"
_WAIT: Final = "wait"


class StoredTensors:
    """Tensors by Hugging Face's names, alike on every rank; they are published in `dtype`."""

    def __init__(self, source: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, ranks: Ranks) -> None:
        """`source`: the tensors as they lie now (FSDP may move them), always the same ones in the same order."""
        tensors = source()
        self.names = list(tensors)
        self.dtype = dtype
        self._sizes = [tensor.numel() * dtype.itemsize for tensor in tensors.values()]
        self._source = source
        self._ranks = ranks

    def gathering(self, names: Collection[str] | None = None) -> "Gathering":
        """Rank 0's: those of `names`, or all, whole, in their order."""
        return Gathering(self, [index for index, name in enumerate(self.names) if names is None or name in names])

    def checksums(self) -> dict[str, TensorEntry]:
        """Rank 0's: what a manifest says of all tensors as they would be gathered now."""
        self._ranks.tell(_CHECKSUMS)
        pairs = zip(self._source().items(), self._checksums(), strict=True)
        return {name: entry(self._as_published(tensor), f"{total:016x}") for (name, tensor), total in pairs}

    def wait(self) -> None:
        """Rank 0's, every now and then while it waits for a disk: the others wait with it."""
        self._ranks.tell(_WAIT)

    def end(self) -> None:
        """Rank 0's: let the others go on."""
        self._ranks.tell(_END)

    def follow(self) -> None:
        """The others': do as rank 0 says, until `end`."""
        while (word := self._ranks.hear()) != _END:
            kind, *indices = word.split()
            if kind == _GATHER:
                tensors = self.tensors()
                for index in indices:
                    self._whole(tensors[int(index)])
            elif kind == _CHECKSUMS:
                self._checksums()
            else:
                assert kind == _WAIT, word

    def tensors(self) -> list[Tensor]:
        """All of them as they lie now, in their order. Until the next forward that is where they are."""
        return [tensor.detach() for tensor in self._source().values()]

    def chunks(self, indices: list[int]) -> Iterator[list[int]]:
        """`indices` in groups of at most CHUNK_BYTES."""
        return in_groups(indices, self._sizes.__getitem__, CHUNK_BYTES)

    def gather(self, indices: list[int], tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's: those of these indices of `tensors()`, one after the other where it has them whole anyway."""
        if self._ranks.control is None:
            return ((self.names[index], self._whole(tensors[index])) for index in indices)
        self._ranks.tell(" ".join([_GATHER, *map(str, indices)]))
        return iter([(self.names[index], self._whole(tensors[index])) for index in indices])

    def _as_published(self, tensor: Tensor) -> Tensor:
        """Its shape and dtype alone."""
        return torch.empty(tensor.shape, dtype=self.dtype, device="meta")

    def _part(self, tensor: "DTensor") -> Tensor:
        """This rank's part, converted before it travels; one that is kept in the host's memory goes to the GPU."""
        return tensor.to_local().to(device=self._ranks.device, dtype=self.dtype)

    def _whole(self, tensor: Tensor) -> Tensor:
        if not in_slices(tensor):
            return tensor.to(self.dtype, copy=tensor.device.type == "cpu")
        part = type(tensor).from_local(
            self._part(tensor), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        whole = part.full_tensor()
        is_own = whole.device.type == "cpu" and whole.data_ptr() == tensor.to_local().data_ptr()  # of a rank alone
        return whole.clone() if is_own else whole

    def _checksums(self) -> list[int]:
        """Of all tensors, modulo 2^64: every rank adds up its words, and rank 0 those of what is not in parts."""
        zero = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        sums: list[Tensor] = []
        for tensor, num_bytes in zip(self.tensors(), self._sizes, strict=True):
            first = self._first_byte(tensor, num_bytes)
            if first is None:
                whole = self._whole(tensor)
                sums.append(checksum_on_device(whole) if self._ranks.is_leader else zero)
            elif first < 0:
                sums.append(zero)
            else:
                assert in_slices(tensor)
                sums.append(part_on_device(self._part(tensor), whole_bytes=num_bytes, first_byte=first))
        own = torch.stack(sums).tolist() if sums else []
        return [sum(values) % 2**64 for values in zip(*self._ranks.gathered(own), strict=True)]

    def _first_byte(self, tensor: Tensor, num_bytes: int) -> int | None:
        """Where this rank's part begins in the whole's `num_bytes`; -1 where another rank has the same; None: words lie
        across parts, or there are no parts."""
        if not in_slices(tensor):
            return None
        from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 (see `models.slices`)

        if not all(type(one) in (Shard, Replicate) for one in tensor.placements):
            return None
        row_bytes = num_bytes // max(1, tensor.shape[0]) if tensor.ndim else 0
        is_in_rows = [one for one in tensor.placements if one.is_shard()] == [Shard(0)]
        if not is_in_rows or row_bytes % word_bytes(num_bytes):
            return None
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "every rank is in the mesh of the parameters"
        if any(at and one.is_replicate() for at, one in zip(coordinates, tensor.placements, strict=True)):
            return -1
        return held_rows(tensor)[0] * row_bytes


class Gathering:
    """Whole tensors one after the other, on rank 0. `close` it before rank 0 says anything else to the others.

    May be used in another thread, and be closed while that thread is still at it.
    """

    def __init__(self, stored: StoredTensors, indices: list[int]) -> None:
        self._stored = stored
        self._tensors = stored.tensors()
        self._chunks = deque(stored.chunks(indices))
        self._ready: Iterator[tuple[str, Tensor]] = iter(())
        self._lock = threading.Lock()
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        while (pair := next(self._ready, None)) is None:
            if not self._chunks:
                raise StopIteration
            with self._lock:
                if self._is_closed:
                    raise InferenceError("nobody waits for these tensors any more")
                with torch.no_grad():
                    self._ready = self._stored.gather(self._chunks.popleft(), self._tensors)
        return pair

    def close(self) -> None:
        """Nothing is gathered any more once this is back."""
        with self._lock:
            self._is_closed = True
