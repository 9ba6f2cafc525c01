"""A simulated clock, and servers on it that die, hang and come back while they generate and load weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

from prime_rl.environments.client import PROBE_TIMEOUT_S, Unreachable, Unwell
from prime_rl.errors import InferenceError
from prime_rl.transport.api import MIN_VERSION_HEADER, HealthResponse, InitTransferRequest, ServedWeights

T = TypeVar("T")

_instances = itertools.count()


class _Jumping(selectors.SelectSelector):
    """Waits by moving the clock forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for something that never comes"
        self.now += max(timeout, 0.0)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time is that of its timers; nothing of the real world may be waited for."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a simulated clock that starts at 0."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


class SimulatedServer:
    """A server and its client. `die`, `hang` and `come_back` at any time."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.base_url = f"http://{name}:8000/v1"
        self.rng = rng
        self.update_s = (0.0, 3.0)
        self.token_s = 0.1
        self.join_s = 0.1
        self.refuses: str | None = None
        self.does_not_resume = False
        self.num_updates = 0
        self.num_served = 0
        self.calls: list[str] = []
        self._goes_on = asyncio.Event()
        self.come_back()

    @property
    def digest(self) -> str | None:
        return str(self.version) if self.version else None

    def die(self) -> None:
        """Connections break, and there is nobody any more."""
        self.is_alive = False
        self._died.set()
        self._goes_on.set()

    def hang(self) -> None:
        """Connections are taken, and nothing is answered."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def come_back(self) -> None:
        """Another process with the first weights."""
        self.is_alive, self.version, self.is_paused = True, 0, False
        self.instance = f"i{next(_instances)}"
        self._died = asyncio.Event()
        self._goes_on.set()

    async def takes(self, seconds: float) -> None:
        """Work for this long. Raises: Unreachable when the server dies meanwhile, or is dead."""
        died = self._died
        if not self.is_alive:
            raise Unreachable("connection refused")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await died.wait()
        await self._goes_on.wait()
        if died.is_set():
            raise Unreachable("connection reset")

    async def probe(self) -> HealthResponse | Unwell:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self.takes(0.01)
        except TimeoutError:
            return Unwell(reason="no answer", is_silent=True)
        except Unreachable as error:
            return Unwell(reason=str(error))
        return HealthResponse(version=self.version, digest=self.digest, instance=self.instance, paused=self.is_paused)

    async def wait_ready(self, timeout: float) -> HealthResponse:
        while isinstance(state := await self.probe(), Unwell):
            if asyncio.get_running_loop().time() >= timeout:
                raise InferenceError(self.complaint(state, timeout))
            await asyncio.sleep(0.1)
        return state

    def complaint(self, state: Unwell, timeout: float) -> str:
        return f"{self.base_url} did not answer for {timeout:g} s: {state.reason}"

    async def check_model(self, name: str) -> None:
        await self.takes(0.01)

    async def update_weights(self, directory: Path, version: int) -> ServedWeights:
        await self.takes(self.rng.uniform(*self.update_s))
        if self.refuses is not None:
            raise InferenceError(self.refuses)
        self.num_updates += 1
        self.version = version
        await self.takes(0.01)
        return ServedWeights(version=self.version, digest=self.digest)

    async def reload_weights(self) -> ServedWeights:
        await self.takes(0.5)
        self.version = 0
        return ServedWeights(version=0, digest=None)

    async def init_transfer(self, request: InitTransferRequest) -> None:
        self.calls.append(f"join {request.rank_offset}/{request.world_size}")
        self.joined = request
        await self.takes(self.join_s)

    async def pause(self) -> None:
        self.calls.append("pause")
        await self.takes(0.01)
        self.is_paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        await self.takes(0.01)
        if self.does_not_resume:
            raise InferenceError("POST /resume answered 500")
        self.is_paused = False

    async def generate(self, request: httpx.Request) -> httpx.Response:
        """A completion whose tokens say which weights they are of."""
        await self.takes(0.001)
        if self.version < int(request.headers[MIN_VERSION_HEADER]):
            return httpx.Response(503)
        versions = []
        for _ in range(json.loads(request.content)["num_tokens"]):
            versions.append(self.version)
            await self.takes(self.token_s)
        self.num_served += 1
        return httpx.Response(200, json={"versions": versions})


class SimulatedNetwork(httpx.AsyncBaseTransport):
    """Requests reach the servers by their names."""

    def __init__(self, servers: list[SimulatedServer]) -> None:
        self._servers = {httpx.URL(server.base_url).host: server for server in servers}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._servers[request.url.host].generate(request)
        except Unreachable as error:
            raise httpx.ReadError(str(error)) from error
