"""Copies of the training state in the host's memory, made while training goes on.

    training loop    step n | save: `Copy.begin` | forward, backward of step n + 1 | wait_copied | update of n + 1
    another thread                              | Copy.make: to the host -------->| the files

Weights and optimizer state change in the update alone, so the copies have a whole forward and backward to be made in.
A GPU copies on a stream of its own, for which its other one waits before the update; nobody else waits for it.
"""

import mmap
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger
from prime_rl.trainer.ckpt import State
from prime_rl.trainer.optim.updates import local

_logger = get_logger(__name__)


class HostBuffers:
    """Memory for one copy of the state, which every copy uses again. What comes from a GPU is page-locked."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._locked: list[int] = []
        self._is_refused = False

    def like(self, key: tuple[str, ...], tensor: Tensor) -> Tensor:
        """The buffer of that name, of the shape and slicing of `tensor`."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty_like(tensor, device="cpu")
            if local(tensor).is_cuda and local(buffer).nbytes:
                self._lock(buffer, local(tensor).device)
        return buffer

    def stream(self, device: torch.device) -> Any:
        """On which `device` copies."""
        return self._streams.setdefault(device, torch.cuda.Stream(device))

    def prepare(self, state: State) -> None:
        """Have all the memory now, rather than in the middle of training."""
        _mapped(state, self.like)

    def close(self) -> None:
        """Nobody copies any more. What were locked pages may come back to this process as other memory."""
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()
        self._buffers.clear()

    def _lock(self, buffer: Tensor, device: torch.device) -> None:
        """Move it to pages of its own, for two pieces of memory on one page cannot both be locked, and lock them.

        torch's own page-locked memory comes in powers of two, up to twice of what is needed.
        """
        with torch.no_grad():  # `local` is the slice itself then
            piece = local(buffer)
            pages = torch.frombuffer(mmap.mmap(-1, piece.nbytes), dtype=piece.dtype)
            piece.set_(pages.untyped_storage(), 0, piece.shape, piece.stride())
        if self._is_refused:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
        if code == 0:
            self._locked.append(piece.data_ptr())
            return
        self._is_refused = True
        with suppress(RuntimeError):  # CUDA tells the next kernel of this thread of the refusal, and only that one
            torch.ones(1, device=device)
        _logger.warning(
            "No page-locked memory is to be had for checkpoints (CUDA error %d): copying takes longer, and the step "
            "that saves with it; see `ulimit -l` and the memory that is free",
            code,
        )


class Copy:
    """The state of one moment. `begin` in the training loop, `make` in another thread."""

    def __init__(self, state: State, buffers: HostBuffers) -> None:
        """Begins: from now on `state` is left alone until `wait_copied` is back."""
        self._state = state
        self._buffers = buffers
        self._is_enqueued = threading.Event()
        self._arrived: list[Any] = []
        self._ready = {device: _event(device) for device in _gpus(state)}

    def make(self) -> State:
        """The copies, once they are there. Raises: ArtifactError where there is no memory for them."""
        try:
            for device, ready in self._ready.items():
                self._buffers.stream(device).wait_event(ready)
            copied: State = _mapped(self._state, self._copied)
            self._arrived = [_event(device, self._buffers.stream(device)) for device in self._ready]
        except (RuntimeError, MemoryError) as error:
            raise ArtifactError(f"the trainer's state cannot be copied for a checkpoint: {error}") from error
        finally:
            self._state = {}
            self._is_enqueued.set()
        for arrived in self._arrived:
            arrived.synchronize()
        return copied

    def wait_copied(self) -> None:
        """In the training loop, before weights change: the host's part is copied, and a GPU waits for its own."""
        self._is_enqueued.wait()
        for arrived, device in zip(self._arrived, self._ready, strict=False):
            torch.cuda.current_stream(device).wait_event(arrived)

    def _copied(self, key: tuple[str, ...], tensor: Tensor) -> Tensor:
        buffer = self._buffers.like(key, tensor)
        source, target = local(tensor), local(buffer)
        if source.is_cuda:
            with torch.cuda.stream(self._buffers.stream(source.device)):
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source)
        return buffer


def num_bytes(state: State) -> int:
    """Of the slices that this rank holds."""
    sizes: list[int] = []
    _mapped(state, lambda _, tensor: sizes.append(local(tensor).nbytes))
    return sum(sizes)


def _mapped(tree: Any, change: Any, key: tuple[str, ...] = ()) -> Any:
    """`tree` with `change(key, tensor)` in place of every tensor; other values stay."""
    if isinstance(tree, dict):
        return {name: _mapped(value, change, (*key, str(name))) for name, value in tree.items()}
    return change(key, tree) if isinstance(tree, Tensor) else tree


def _gpus(state: State) -> list[torch.device]:
    found: dict[torch.device, None] = {}

    def note(_: tuple[str, ...], tensor: Tensor) -> None:
        if local(tensor).is_cuda:
            found[local(tensor).device] = None

    _mapped(state, note)
    return list(found)


def _event(device: torch.device, stream: Any = None) -> Any:
    event = torch.cuda.Event(blocking=True)
    event.record(stream or torch.cuda.current_stream(device))
    return event
