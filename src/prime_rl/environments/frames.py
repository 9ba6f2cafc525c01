"""Messages between a pool and its workers over a socket, both ends: a header, then msgpack.

The header is big-endian: four bytes of length, and eight of the number of the rollout that the message is, or 0. So a
rollout in which somebody's code put what can be sent but not read is known, and no other suffers by it.

The prompt of a turn usually begins with the whole turn before it, so a conversation of n turns would send its first
tokens n times. On the wire a prompt holds only what is new, and the reader puts it together again; token ids that turns
share are then the same objects, which keeps thousands of finished rollouts small.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import Final

import msgspec

from prime_rl.environments.rollouts import (
    AvoidServers,
    CancelRollout,
    EnvironmentSpec,
    Generated,
    Rollout,
    RolloutRequest,
    ScoreGroup,
    Turn,
    WorkerReady,
    WorkerRefused,
    WorkerState,
)


class SentRollout(msgspec.Struct, frozen=True, tag="sent_rollout"):
    """A rollout whose turns lack what they share with the turn before: as it is sent, and kept on disk."""

    rollout: Rollout
    num_shared: list[int]
    """For each turn: tokens of the turn before it, prompt first, that its prompt begins with."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What came instead of a message that cannot be read."""

    number: int
    """Which rollout it was. 0: none."""
    why: str


Message = (
    EnvironmentSpec
    | RolloutRequest
    | ScoreGroup
    | AvoidServers
    | CancelRollout
    | WorkerReady
    | WorkerRefused
    | WorkerState
    | Generated
    | Rollout
)
_Sent = Message | SentRollout

_HEADER: Final = struct.Struct(">IQ")
_BUFFER_BYTES: Final = 1 << 20
READ_BUDGET_S: Final = 0.005
"""Messages that are there already are decoded for so long at most before the event loop gets its turn."""


class Frames:
    """Messages over a stream, in both directions. Used by both ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_Sent] = msgspec.msgpack.Decoder(_Sent)
        self._clock = asyncio.get_running_loop().time
        self._reading_since = 0.0

    @classmethod
    async def over(cls, connection: socket.socket) -> Frames:
        return cls(*await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES))

    def send(self, message: Message) -> None:
        """Queue one message. One that the other end can no longer take is lost, which `read` then tells."""
        if self._writer.is_closing():
            return
        content = self._encoder.encode(shortened(message) if isinstance(message, Rollout) else message)
        header = _HEADER.pack(len(content), message.id if isinstance(message, Rollout) else 0)
        self._writer.write(header + content)  # in one piece: each write is a system call, and wakes the other end

    async def read(self) -> Message | Unreadable | None:
        """The next message; None when the other end is gone."""
        # Reading what has arrived already never suspends: without this, a thousand rollouts that end together would
        # keep everything else in the loop waiting until the last of them is decoded.
        if self._clock() - self._reading_since > READ_BUDGET_S:
            await asyncio.sleep(0)
            self._reading_since = self._clock()
        try:
            length, number = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        try:
            message = self._decoder.decode(content)
            return restored(message) if isinstance(message, SentRollout) else message
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Unreadable(number, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Send what is queued, for as long as that takes, and close."""
        self._writer.close()
        with contextlib.suppress(OSError):  # the other end closed first
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Close at once. What is queued is lost, and `read` tells the end once what has arrived is read."""
        self._writer.transport.abort()


def shortened(rollout: Rollout) -> SentRollout:
    """As it is sent."""
    before: tuple[int, ...] = ()
    turns: list[Turn] = []
    num_shared: list[int] = []
    for turn in rollout.turns:
        num = len(before) if tuple(turn.prompt_ids[: len(before)]) == before else 0
        num_shared.append(num)
        turns.append(msgspec.structs.replace(turn, prompt_ids=turn.prompt_ids[num:]) if num else turn)
        before = (*turn.prompt_ids, *turn.completion_ids)
    return SentRollout(msgspec.structs.replace(rollout, turns=turns), num_shared)


def restored(sent: SentRollout) -> Rollout:
    """What `shortened` was given. Raises: ValueError for numbers that are not those of the turns."""
    before: tuple[int, ...] = ()
    turns: list[Turn] = []
    for turn, num in zip(sent.rollout.turns, sent.num_shared, strict=True):
        if num:
            turn = msgspec.structs.replace(turn, prompt_ids=(*before[:num], *turn.prompt_ids))
        turns.append(turn)
        before = (*turn.prompt_ids, *turn.completion_ids)
    return msgspec.structs.replace(sent.rollout, turns=turns)
