"""Optimizer state in the host's memory, which visits the device for each step (`model.optim_cpu_offload`).

    up stream      bucket i + 1, host -> device
    main stream    update of bucket i
    down stream    bucket i - 1, device -> host

The three overlap, so a step takes about as long as the state needs over the bus one way, and the device holds about
three buckets of it. The arithmetic is the device's: results are those without offload, bit by bit.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from prime_rl.models.hf import in_groups
from prime_rl.models.slices import in_slices
from prime_rl.trainer.optim.updates import Slot, local

BUCKET_BYTES: Final = 1 << 28


class HostState:
    """Moves the states of slots. On a CPU everything is a copy in place, without streams."""

    def __init__(self, device: torch.device, bucket_bytes: int | None = None) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._runtime: Any = torch.get_device_module(device)
        self._up = self._runtime.Stream()
        self._down = self._runtime.Stream()

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros of the tensor's shape and slicing in the host's memory, pinned where that speeds up copies."""
        return torch.zeros_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")

    def visits(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """`slots` a bucket at a time, with their states on the device; what is done to these there is kept."""
        buckets = list(self._buckets(slots))
        self._up.wait_stream(self._down)  # the last step's results
        ahead = self._fetched(buckets[0]) if buckets else None
        for index, bucket in enumerate(buckets):
            assert ahead is not None
            visiting, arrived = ahead
            if index + 1 < len(buckets):
                ahead = self._fetched(buckets[index + 1])
            arrived.wait(self._runtime.current_stream())
            yield visiting
            self._return(visiting, bucket)

    def settle(self) -> None:
        """Wait until everything is in the host's memory."""
        self._runtime.synchronize()

    def _fetched(self, slots: Sequence[Slot]) -> tuple[list[Slot], Any]:
        """States on the device, and the event after which they are there."""
        visiting = [
            Slot(
                slot.name,
                slot.parameter,
                {key: torch.empty_like(local(tensor), device=self._device) for key, tensor in slot.state.items()},
            )
            for slot in slots
        ]
        self._up.wait_stream(self._runtime.current_stream())  # it may still use the memory that was allocated here
        with self._runtime.stream(self._up):
            for slot, there in zip(slots, visiting, strict=True):
                for key, tensor in slot.state.items():
                    there.state[key].copy_(local(tensor), non_blocking=True)
        arrived = self._runtime.Event()
        arrived.record(self._up)
        return visiting, arrived

    def _return(self, visiting: Sequence[Slot], slots: Sequence[Slot]) -> None:
        self._down.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._down):
            for slot, there in zip(slots, visiting, strict=True):
                for key, tensor in slot.state.items():
                    local(tensor).copy_(there.state[key], non_blocking=True)
                    if self._device.type == "cuda":
                        there.state[key].record_stream(self._down)  # no reuse of its memory before the copy is done

    def _buckets(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """All ranks cut alike, though their slices differ in size: a rule may exchange what is in a bucket."""
        return in_groups(slots, lambda slot: sum(map(_mean_bytes, slot.state.values())), self._bucket_bytes)


def _mean_bytes(tensor: Tensor) -> int:
    """Of a slice, over all ranks."""
    if not in_slices(tensor):
        return tensor.nbytes
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    num_slices = math.prod(size for placement, size in sizes if placement.is_shard())
    return tensor.numel() * tensor.element_size() // num_slices
