"""Stands in for NCCL and, run as a program, for orchestrator and server at its other end: raw bytes over TCP.

`python -m tests.doubles.transfer ROOT PORT RESULTS NUM_STEPS` waits for announcements in ROOT, says that it is ready,
receives the tensors, and appends to RESULTS (JSON lines) which version came with which checksums. After NUM_STEPS
it says once more that it is ready, and is gone.
"""

import json
import socket
import sys
import time
from pathlib import Path

import torch

from prime_rl.errors import InferenceError
from prime_rl.transport.broadcasts import ready_file
from prime_rl.transport.checksum import entries
from prime_rl.transport.manifest import latest_step, read_manifest
from prime_rl.transport.nccl import Stopped, Tensors


class TcpSender:
    """A `Sender` that one receiver connects to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self._peer: socket.socket | None = None
        self.port = self._listener.getsockname()[1]

    def open(self, stopped: Stopped) -> None:
        if self._peer is None:
            self._peer, _ = self._listener.accept()

    def check(self) -> None:
        return None

    def send(self, tensors: Tensors, stopped: Stopped) -> None:
        assert self._peer is not None
        try:
            for _, tensor in tensors:
                self._peer.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            if self._peer.recv(4) != b"done":
                raise InferenceError("the receiver went away")
        except OSError as error:
            raise InferenceError(f"the receiver went away: {error}") from error

    def close(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


def receive(root: Path, port: int, results: Path, num_steps: int) -> None:
    """The program."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        version = 0
        for _ in range(num_steps):
            version = _next(root, version)
            ready_file(root, version).touch()
            tensors = {}
            for name, entry in read_manifest(root / f"step_{version}").weights.tensors.items():  # type: ignore[union-attr]
                empty = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                _fill(peer, memoryview(empty.view(-1).view(torch.uint8).numpy().data))
                tensors[name] = empty
            with results.open("a") as file:
                found = {name: entry.checksum for name, entry in entries(tensors).items()}
                file.write(json.dumps({"version": version, "tensors": found}) + "\n")
            peer.sendall(b"done")
        ready_file(root, _next(root, version)).touch()


def _next(root: Path, version: int) -> int:
    end = time.monotonic() + 60
    while (latest := latest_step(root) or 0) <= version:
        assert time.monotonic() < end, f"nothing newer than {version} was announced in a minute"
        time.sleep(0.002)
    return latest


def _fill(peer: socket.socket, rest: memoryview) -> None:
    while rest:
        count = peer.recv_into(rest)
        assert count, "the sender went away"
        rest = rest[count:]


if __name__ == "__main__":
    receive(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
