"""The tensors of a model for whoever publishes them, wherever they lie: whole, or each rank with a part.

    rank 0   iterates `gathering`: tells "gather 7 8 9" --control group--> the others gather 7, 8 and 9 with it
             `checksums`:          tells "checksums"    -----------------> the others sum over their parts
             `end`:                tells "end"          -----------------> the others leave `follow`

Nobody is in a collective that rank 0 has not asked for just now. So rank 0 may wait for a disk or a server for as long
as it likes, or give up in the middle, and no rank ever holds more than a few whole tensors.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from prime_rl.errors import InferenceError
from prime_rl.models.hf import held_rows
from prime_rl.trainer.ranks import Ranks
from prime_rl.transport.checksum import checksum_on_device, entry, part_on_device, word_bytes
from prime_rl.transport.manifest import TensorEntry

CHUNK_BYTES: Final = 2**28
"""Tensors of so many bytes are gathered at one word; a single larger one at a word of its own."""

_END: Final = "end"
_GATHER: Final = "gather"
_CHECKSUMS: Final = "checksums"


class StoredTensors:
    """Tensors by Hugging Face's names, alike on every rank; they are published in `dtype`."""

    def __init__(self, source: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, ranks: Ranks) -> None:
        """`source`: the tensors as they lie now (FSDP may move them), always the same ones in the same order."""
        self.names = list(source())
        self.dtype = dtype
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

    def end(self) -> None:
        """Rank 0's: let the others go on."""
        self._ranks.tell(_END)

    def follow(self) -> None:
        """The others': do as rank 0 says, until `end`."""
        while (word := self._ranks.hear()) != _END:
            kind, *indices = word.split()
            if kind == _GATHER:
                for tensor in self._chosen([int(index) for index in indices]):
                    self._whole(tensor)
            else:
                assert kind == _CHECKSUMS, word
                self._checksums()

    def chunks(self, indices: list[int]) -> Iterator[list[int]]:
        """`indices` in groups of at most CHUNK_BYTES."""
        chunk: list[int] = []
        size = 0
        for index, tensor in zip(indices, self._chosen(indices), strict=True):
            num_bytes = self._as_published(tensor).nbytes
            if chunk and size + num_bytes > CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(index)
            size += num_bytes
        if chunk:
            yield chunk

    def gather(self, indices: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's: the tensors of these indices, one after the other where it has them whole anyway."""
        names, tensors = [self.names[index] for index in indices], self._chosen(indices)
        if self._ranks.control is None:
            return zip(names, map(self._whole, tensors), strict=True)
        self._ranks.tell(" ".join([_GATHER, *map(str, indices)]))
        return iter([(name, self._whole(tensor)) for name, tensor in zip(names, tensors, strict=True)])

    def _chosen(self, indices: list[int]) -> list[Tensor]:
        tensors = list(self._source().values())
        return [tensors[index].detach() for index in indices]

    def _as_published(self, tensor: Tensor) -> Tensor:
        """Its shape and dtype alone."""
        return torch.empty(tensor.shape, dtype=self.dtype, device="meta")

    def _part(self, tensor: DTensor) -> Tensor:
        """This rank's part, converted before it travels; one that is kept in the host's memory goes to the GPU."""
        return tensor.to_local().to(device=self._ranks.device, dtype=self.dtype)

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.to(self.dtype)
        part = DTensor.from_local(
            self._part(tensor), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        return part.full_tensor()

    def _checksums(self) -> list[int]:
        """Of all tensors, modulo 2^64: every rank adds up its words, and rank 0 those of what is not in parts."""
        zero = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        sums: list[Tensor] = []
        for tensor in self._chosen(list(range(len(self.names)))):
            first = self._first_byte(tensor)
            if first is None:
                whole = self._whole(tensor)
                sums.append(checksum_on_device(whole) if self._ranks.is_leader else zero)
            elif first < 0:
                sums.append(zero)
            else:
                assert isinstance(tensor, DTensor)
                whole_bytes = self._as_published(tensor).nbytes
                sums.append(part_on_device(self._part(tensor), whole_bytes=whole_bytes, first_byte=first))
        own = torch.stack(sums).tolist() if sums else []
        return [sum(values) % 2**64 for values in zip(*self._ranks.gathered(own), strict=True)]

    def _first_byte(self, tensor: Tensor) -> int | None:
        """Where this rank's part begins; -1 where another rank has the same; None: words lie across parts, or there are
        no parts."""
        if not isinstance(tensor, DTensor) or not all(type(one) in (Shard, Replicate) for one in tensor.placements):
            return None
        num_bytes = self._as_published(tensor).nbytes
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
                    self._ready = self._stored.gather(self._chunks.popleft())
        return pair

    def close(self) -> None:
        """Nothing is gathered any more once this is back."""
        with self._lock:
            self._is_closed = True
