"""Weights from the trainer's GPU to those of all servers over NCCL: the sender, and what both ends must agree on.

    trainer, rank 0 --broadcast of buffers in which tensors lie one after the other--> ranks 1, 2, ...: vLLM's workers

The receiver is vLLM's own weight-transfer engine (`inference.vllm.transfer`), and the sender packs with vLLM's own
function, so that both ends cut the tensors into buffers alike. vllm, which is an extra and takes seconds to import, is
imported where it is used.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch

from prime_rl import activity
from prime_rl.errors import ConfigError, DeadlineExceeded, InferenceError
from prime_rl.ports import check_free

BUFFER_BYTES: Final = 2**29
"""Size at which a buffer is sent: while one is on its way the next is packed, and at the other end unpacked."""

NUM_BUFFERS: Final = 2
_POLL_S: Final = 0.05

Stopped = Callable[[], bool]
Tensors = Iterable[tuple[str, torch.Tensor]]


class Sender(Protocol):
    """Sends tensors to all servers. Both calls end early, without error, once `stopped` says so."""

    def open(self, stopped: Stopped) -> None:
        """Wait until the group is complete. Raises: InferenceError when it cannot be, DeadlineExceeded."""
        ...

    def check(self) -> None:
        """At once. Raises: InferenceError when the group can no longer become complete."""
        ...

    def send(self, tensors: Tensors, stopped: Stopped) -> None:
        """Send the tensors in their order; back when they may be changed. Raises: InferenceError, DeadlineExceeded.

        They may be asked for in another thread, and after an error still be asked for there.
        """
        ...

    def close(self) -> None:
        """Leave the group, whatever state it is in."""
        ...


class NcclSender:
    """The trainer's first rank in a group that vLLM makes (StatelessProcessGroup and PyNcclCommunicator).

    The group is formed in a thread from the start, for vLLM takes seconds to import and servers longer to start.
    NCCL's calls know no deadline, so each runs in a thread that is waited for; a group in which one hangs is aborted.
    """

    def __init__(self, *, host: str, port: int, world_size: int, device: torch.device, timeout: float) -> None:
        """`world_size`: this rank and all GPUs of all servers. `timeout`: seconds, for forming it and for each send.

        Raises: ConfigError where vLLM is not installed or `device` is no GPU.
        """
        if device.type != "cuda":
            raise ConfigError(
                f"weight_broadcast.type nccl sends from a GPU, and the trainer runs on {device}; set it to filesystem"
            )
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "weight_broadcast.type nccl needs vLLM beside the trainer too: pip install 'prime-rl[vllm]', or set "
                "weight_broadcast.type to filesystem"
            )
        self._host, self._port = host, port
        self._world_size = world_size
        self._device = device
        self._timeout = timeout
        self._group: Any = None
        self._streams: list[torch.cuda.Stream] = []
        self._meeting = (
            f"trainer and servers to meet at {host}:{port} (weight_broadcast.host and port), {world_size} GPUs "
            "(1 + weight_broadcast.inference_world_size)"
        )
        self._opening = _Call(self._form, "nccl-open")

    def open(self, stopped: Stopped) -> None:
        self._opening.wait(self._timeout, self._meeting, stopped)

    def check(self) -> None:
        self._opening.check(self._meeting)

    def send(self, tensors: Tensors, stopped: Stopped) -> None:
        _Call(lambda: self._send(tensors), "nccl-send").wait(self._timeout, "the servers to take the weights", stopped)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def _form(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415
        from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415

        check_free(self._host, self._port, "weight_broadcast.port")
        with torch.cuda.device(self._device):
            store = StatelessProcessGroup.create(
                host=self._host, port=self._port, rank=0, world_size=self._world_size, store_timeout=int(self._timeout)
            )
            group = PyNcclCommunicator(store, device=torch.cuda.current_device())
            self._streams = [torch.cuda.Stream() for _ in range(NUM_BUFFERS)]  # type: ignore[no-untyped-call]
        if not group.available:
            raise InferenceError("vLLM finds no NCCL library (VLLM_NCCL_SO_PATH names one)")
        self._group = group

    def _send(self, tensors: Tensors) -> None:
        """As vLLM's `packed_nccl_broadcast_producer`, but with streams that stay: memory that was allocated on a stream
        is reused on that stream alone, and vLLM 0.26 takes new ones at each send.

        Tensors that are gathered from several ranks come into being on the stream of the buffer that they go into.
        """
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors  # noqa: PLC0415

        pairs = iter(tensors)
        in_flight: list[Any] = [None] * NUM_BUFFERS
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the streams do not wait for whoever computed the tensors
            for index in itertools.cycle(range(NUM_BUFFERS)):
                stream = self._streams[index]
                stream.synchronize()
                in_flight[index] = None  # has left
                with torch.cuda.stream(stream):
                    in_flight[index] = pack_tensors(pairs, lambda pair: pair[1], BUFFER_BYTES)
                    if in_flight[index] is None:
                        break
                    self._group.broadcast(in_flight[index].packed_tensor, src=0, stream=stream)
            torch.cuda.synchronize()


class _Call:
    """A call in a thread of its own, because it may never return."""

    def __init__(self, call: Callable[[], None], name: str) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    def wait(self, timeout: float, what: str, stopped: Stopped) -> None:
        """Until it returns or `stopped`. Raises: InferenceError for what it raised, DeadlineExceeded."""
        with activity.waiting("inference", what, deadline_s=timeout) as waiting:
            while not self._done.wait(_POLL_S):
                if stopped():
                    return
                if waiting.seconds >= timeout:  # nobody is started again for it: weights come as files then
                    raise DeadlineExceeded(f"waited {timeout:g} s (weight_broadcast.timeout) for {what}")
        self.check(what)

    def check(self, what: str) -> None:
        """Raises: InferenceError for what it raised, if it has."""
        if self._error is not None:
            raise InferenceError(f"while waiting for {what}: {type(self._error).__name__}: {self._error}")

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (a supervision point: handed to whoever waits)
            self._error = error
        finally:
            self._done.set()
