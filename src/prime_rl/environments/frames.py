"""Messages between a pool and its workers over a socket: four bytes of length (big-endian), then msgpack. Both ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

import msgspec

from prime_rl.environments.rollouts import (
    AvoidServers,
    CancelRollout,
    EnvironmentSpec,
    Rollout,
    RolloutRequest,
    WorkerReady,
    WorkerRefused,
)

Message = EnvironmentSpec | RolloutRequest | AvoidServers | CancelRollout | WorkerReady | WorkerRefused | Rollout

_LENGTH_BYTES: Final = 4


class Frames:
    """Messages over a stream, in both directions. Used by both ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    @classmethod
    async def over(cls, connection: socket.socket) -> Frames:
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Queue one message. One that the other end can no longer take is lost, which `read` then tells."""
        content = self._encoder.encode(message)
        self._writer.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)

    async def read(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self._decoder.decode(content)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the other end closed first
            await self._writer.wait_closed()
