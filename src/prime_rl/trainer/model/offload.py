"""Activations that wait for the backward pass in the host's memory.

    forward    saved tensor --own stream--> host     the GPU's copy goes when the copy is done
    backward   host --own stream--> GPU              fetched a few tensors ahead, in the opposite order

Neither direction makes the host wait for the GPU. Whole storages are moved, each once however many tensors view it.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

MIN_BYTES: Final = 1 << 20
"""Smaller tensors stay: moving them costs more than it frees."""


class _Moved:
    """One storage: its bytes on the host, and on the device while they are (or are about to be) needed there."""

    def __init__(self, host: Tensor, source: Tensor, previous: "_Moved | None") -> None:
        self.host = host
        self.device: Tensor | None = source
        self.event: torch.cuda.Event | None = None
        """After the copy that runs or ran last, in either direction."""
        self.source = StorageWeakRef(source.untyped_storage())
        self.previous = None if previous is None else weakref.ref(previous)


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, as a view of a moved storage."""

    moved: _Moved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Moves what autograd saves inside wrapped functions to the host, and back for the backward pass.

    On a CPU the bytes are copied likewise, without streams, which tests rely on.
    """

    def __init__(
        self, device: torch.device, *, pin_memory: bool, max_inflight: int, min_bytes: int = MIN_BYTES
    ) -> None:
        """`max_inflight`: storages that are copied at a time and so still held by the device, in either direction."""
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
        self._device = device
        self._pin_memory = pin_memory and device.type == "cuda"
        self._max_inflight = max_inflight
        self._min_bytes = min_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[_Moved] = deque()
        self._by_address: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Moved] | None = None
        self.num_moved = 0
        """Storages sent to the host so far."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a layer, what it saves offloaded. Its first argument is the layer's own; other tensors that it
        is given are shared by all layers and stay on the device."""

        @functools.wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            shared = {
                leaf.untyped_storage().data_ptr()
                for leaf in tree_leaves((args[1:], kwargs))
                if isinstance(leaf, Tensor)
            }
            with saved_tensors_hooks(functools.partial(self._pack, shared), self._unpack):
                return forward(*args, **kwargs)

        return offloaded

    def _pack(self, shared: set[int], tensor: Tensor) -> Tensor | _View:
        if type(tensor) is not Tensor or isinstance(tensor, nn.Parameter) or tensor.device != self._device:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or storage.data_ptr() in shared:
            return tensor
        moved = self._by_address.get(storage.data_ptr())
        if moved is None or moved.source.expired():  # an expired one lay at this address before
            moved = self._send(storage)
        return _View(moved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _send(self, storage: torch.UntypedStorage) -> _Moved:
        source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._pin_memory)
        moved = _Moved(host, source, self._last() if self._last is not None else None)
        self._by_address[storage.data_ptr()] = moved
        self._last = weakref.ref(moved)
        self.num_moved += 1
        self._copy(host, source, moved)
        self._leaving.append(moved)
        while len(self._leaving) > self._max_inflight:
            self._release(self._leaving.popleft())
        return moved

    def _copy(self, to: Tensor, source: Tensor, moved: _Moved) -> None:
        """Copy on the own stream, after all that the current stream has been given so far."""
        if self._stream is None:
            to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            moved.event = self._stream.record_event()

    def _release(self, moved: _Moved) -> None:
        """Give the device's memory back to the current stream, after the copy."""
        self._wait(moved)
        moved.device = None

    def _wait(self, moved: _Moved) -> None:
        if moved.event is not None:
            torch.cuda.current_stream(self._device).wait_event(moved.event)

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved = packed.moved
        if moved in self._leaving:  # it has not left yet, and need not
            self._leaving.remove(moved)
        self._fetch(moved)
        self._wait(moved)
        self._fetch_ahead(moved)
        assert moved.device is not None
        flat = torch.empty(0, dtype=packed.dtype, device=self._device)
        return flat.set_(moved.device.untyped_storage(), packed.offset, packed.size, packed.stride)

    def _fetch_ahead(self, moved: _Moved) -> None:
        for _ in range(self._max_inflight):
            earlier = moved.previous() if moved.previous is not None else None
            if earlier is None:
                return
            self._fetch(earlier)
            moved = earlier

    def _fetch(self, moved: _Moved) -> None:
        """Start to bring a storage back, unless it is there or on its way."""
        if moved.device is not None:
            return
        moved.device = torch.empty_like(moved.host, device=self._device)
        if self._stream is not None:
            moved.device.record_stream(self._stream)  # should it be dropped unused, while it is being written
        self._copy(moved.device, moved.host, moved)
