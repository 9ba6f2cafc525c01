"""Weights from GPU to GPU: the orchestrator's part of what trainer and servers do between themselves over NCCL.

    trainer: broadcasts/step_N appears -> here: all servers pause, `ready_N` appears -> trainer sends, servers take
                                       -> all servers resume

Everybody of the group takes part, or nobody can. So when a server of the group is lost, its update fails, or trainer or
orchestrator are started again, weights come as files from that step on; trainer and orchestrator tell each other so
(`transport.broadcasts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from prime_rl.aio import together
from prime_rl.config.artifacts import NCCLBroadcastConfig
from prime_rl.errors import ConfigError, InferenceError
from prime_rl.logs import get_logger
from prime_rl.orchestrator.fleet import Fleet, Server, State, Target
from prime_rl.transport.api import InitTransferRequest
from prime_rl.transport.broadcasts import MEETING_TIMEOUT_S, fall_back, fallback_reason, finish, is_over, ready_file
from prime_rl.transport.manifest import complete_steps

FALLBACK_POLL_S: Final = 0.5

_logger = get_logger(__name__)


class Broadcasts:
    """The NCCL group of a run, as far as the orchestrator has to do with it."""

    def __init__(self, fleet: Fleet, directory: Path, config: NCCLBroadcastConfig) -> None:
        """`directory`: `broadcasts` of the run."""
        self.directory = directory
        self._fleet = fleet
        self._config = config
        self._members: dict[str, Server] = {}
        """By the instance that joined."""

    def is_over(self) -> bool:
        """Whether weights come as files: either side said so."""
        return is_over(self.directory)

    def begin(self, *, again: bool) -> None:
        """Give up on NCCL where somebody sent weights before this process was there: `again`, or by what is left of it.

        Trainer and servers are in a group that was formed with another orchestrator, or in none.
        """
        if again or complete_steps(self.directory):
            reason = "the orchestrator was started again"
            _logger.warning("Weights come as files from now on, not over NCCL: %s", reason)
            fall_back(self.directory, reason)

    async def open(self) -> None:
        """Have all servers join the trainer's group; falls back to files when one cannot.

        Raises: ConfigError when the GPUs do not divide among the servers.
        """
        servers, world_size = self._fleet.servers, self._config.inference_world_size
        if world_size % len(servers):
            raise ConfigError(
                f"weight_broadcast.inference_world_size = {world_size} does not divide among {len(servers)} servers; "
                "set it to the GPUs of all servers together"
            )
        gpus = world_size // len(servers)
        requests = [
            InitTransferRequest(
                host=self._config.host,
                port=self._config.port,
                rank_offset=1 + index * gpus,
                world_size=1 + world_size,
                timeout=min(self._config.timeout, MEETING_TIMEOUT_S),
            )
            for index in range(len(servers))
        ]
        missing = [server.name for server in servers if server.state is not State.UP]
        if missing:
            self.fall_back(f"{', '.join(missing)} was not there when the group was formed")
            return
        try:
            await self._unless_given_up(
                together(
                    *(server.client.init_transfer(request) for server, request in zip(servers, requests, strict=True))
                )
            )
        except InferenceError as error:
            self.fall_back(f"the group could not be formed: {error}")
            return
        self._members = {server.instance: server for server in servers if server.instance is not None}
        self._fleet.on_lost = self._on_lost
        _logger.info("%d servers joined the trainer's NCCL group of %d", len(servers), 1 + world_size)

    async def relay(self, target: Target) -> bool:
        """Have the servers take what the trainer sends for `target`. False: not done; it comes as files.

        Raises: InferenceError when no server is up for too long.
        """
        lost = [server.name for instance, server in self._members.items() if not _is_there(server, instance)]
        if lost or not self._members:
            self.fall_back(f"{', '.join(lost) or 'no server'} is not in the group any more")
            return False
        members = list(self._members.values())
        if self.is_over():
            return False
        try:
            for server in members:
                server.is_held = True
            await together(*(server.client.pause() for server in members))
            if self.is_over():
                return False
            ready_file(self.directory, target.version).touch()
            await self._take(replace(target, only_for=frozenset(self._members)))
        except InferenceError as error:
            self.fall_back(str(error))
            return False
        finally:
            if self._fleet.target.version == target.version:  # whoever comes again later took no part
                self._fleet.target = replace(self._fleet.target, only_for=frozenset())
            await self._resume(members)
        return True

    def fall_back(self, reason: str) -> None:
        """From now on weights come as files. Again is no harm: the first reason stays."""
        if self.is_over():
            return
        _logger.warning("Weights come as files from now on, not over NCCL: %s", reason)
        fall_back(self.directory, reason)

    def close(self) -> None:
        """The trainer need not wait for anybody to be ready any more."""
        finish(self.directory)

    def _on_lost(self, server: Server, reason: str) -> None:
        """At once: the trainer writes what it sent last, which the server could not be given when it is back."""
        if server.instance in self._members:
            self.fall_back(f"{server.name} is lost: {reason}")

    async def _resume(self, servers: Sequence[Server]) -> None:
        """Have them go on. One that does not is lost, for rollouts would hang in it; it is resumed when it joins."""
        results = await asyncio.gather(*(server.client.resume() for server in servers), return_exceptions=True)
        for server, result in zip(servers, results, strict=True):
            server.is_held = False
            if isinstance(result, BaseException):
                self._fleet.lose(server, f"it was not resumed: {result}")

    async def _take(self, target: Target) -> None:
        """Have the servers take what is sent now. Raises: InferenceError when it is not sent after all."""
        try:
            await self._unless_given_up(self._fleet.update(target))
        except _GivenUp as error:
            for server in self._members.values():
                if server.lock.locked():
                    self._fleet.lose(server, f"weights are not sent any more: {error}")
            raise

    async def _unless_given_up(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work` as long as NCCL is not given up. Raises: _GivenUp, and what `work` raises."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=FALLBACK_POLL_S))[0]:
                if (reason := fallback_reason(self.directory)) is not None:
                    raise _GivenUp(reason)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class _GivenUp(InferenceError):
    """Somebody wrote FALLBACK."""


def _is_there(server: Server, instance: str) -> bool:
    return server.state is State.UP and server.instance == instance
