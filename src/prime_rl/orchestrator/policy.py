"""The weights that the server serves: relays those that the trainer publishes, and brings a lost server up to date.

    trainer -> weights/step_N (complete: it has its marker) -> POST /update_weights -> `version`

The server checks every file against the marker and answers with the digest of what it read, which must be that of the
directory here. No torch: markers and digests are in `transport.manifest`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prime_rl.environments.client import InferenceClient
from prime_rl.errors import InferenceError
from prime_rl.logs import get_logger
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import complete_steps, latest_step

POLL_S: Final = 0.1

_logger = get_logger(__name__)


class Policy:
    """Which weights are served. `version` never goes back."""

    def __init__(self, client: InferenceClient, weights: Path, *, outage_timeout_s: float) -> None:
        self.version = 0
        self.num_updates = 0
        self.update_s = 0.0
        """Seconds that the last update took."""
        self._client = client
        self._weights = weights
        self._outage_timeout_s = outage_timeout_s
        self._outage_ended_at = -math.inf
        self._lock = asyncio.Lock()

    async def start(self, served: int) -> None:
        """Begin with the base weights, the server serving version `served` now.

        `weights/step_0` is loaded where it exists; else the model that the server was started with is the base.
        """
        if 0 in await asyncio.to_thread(complete_steps, self._weights):
            await self._client.update_weights(step_dir(self._weights, 0), 0)
        elif served != 0:
            raise InferenceError(
                f"the server at {self._client.base_url} serves weights {served} of another run; restart it, so that it "
                "serves the model that this run starts from"
            )

    async def watch(self, on_update: Callable[[int], None]) -> None:
        """Relay new weights, newest first, and tell `on_update` their version. Returns never."""
        while True:
            newest = await asyncio.to_thread(latest_step, self._weights)
            if newest is not None and newest > self.version:
                async with self._lock:
                    await self._load(newest)
                on_update(newest)
            else:
                await asyncio.sleep(POLL_S)

    async def survive_outage(self, dispatched_at: float) -> bool:
        """Whether the server was gone while a rollout ran that was dispatched at `dispatched_at` (`time.monotonic`).

        All rollouts in flight fail with the server, and tell it one after the other. The first waits here until the
        server is back and serves `version` again; the others met the same outage.

        Raises: InferenceError when it stays away for too long.
        """
        async with self._lock:
            if dispatched_at >= self._outage_ended_at and (served := await self._wait_back()) < self.version:
                _logger.warning("The inference server is back with weights %d; loading %d", served, self.version)
                await self._client.update_weights(step_dir(self._weights, self.version), self.version)
                self._outage_ended_at = time.monotonic()
            return dispatched_at < self._outage_ended_at

    async def _wait_back(self) -> int:
        """The version served. Where there is none, the server is waited for, and that is an outage."""
        served = await self._client.health()
        if served is None:
            _logger.warning("The inference server does not answer; waiting for it")
            served = await self._client.wait_ready(self._outage_timeout_s)
            self._outage_ended_at = time.monotonic()
        return served

    async def _load(self, version: int) -> None:
        started = time.monotonic()
        directory = step_dir(self._weights, version)
        was_restarted = await self._wait_back() < self.version
        try:
            await self._client.update_weights(directory, version)
        except InferenceError:
            if await self._client.health() is not None:
                raise
            await self._wait_back()
            await self._client.update_weights(directory, version)
            was_restarted = True
        if was_restarted:
            self._outage_ended_at = time.monotonic()
        self.version = version
        self.num_updates += 1
        self.update_s = time.monotonic() - started
        _logger.debug("Serving weights %d after %.2f s", version, self.update_s)
