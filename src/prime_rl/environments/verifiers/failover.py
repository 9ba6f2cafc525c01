"""A rollout's requests find a server that answers them: the transport below verifiers' clients.

A rollout keeps to one server, whose prefix cache knows its earlier turns. A request that the server does not answer -
the connection breaks, it answers 502, 503 or 504, or the orchestrator says that the server is lost - is sent again from
its beginning to the next one, and to the same one where there is no other. So is one that it answers with an error of
its own (500), a few times: the turns before it are worth more than one more try. Nothing of a half answer is used: an
answer is handed up once it is whole, and only that one, so that no token is taken twice.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from prime_rl.transport.api import MIN_VERSION_HEADER

CONNECT_TIMEOUT_S: Final = 60.0
"""Generous: a server that is gone refuses at once, and one that is merely starved of CPU accepts late."""
NUM_POOLS: Final = 32
KEEPALIVE_EXPIRY_S: Final = 2.0
"""Less than the 5 s after which uvicorn closes idle connections: a request sent into a closing one would fail."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
"""Pauses after every server was tried: the first, doubled each time up to the longest."""
MAX_ERRORS: Final = 3
"""Errors of their own (500) that servers answer one request with before it is given up, each having been asked."""

_UNAVAILABLE: Final = frozenset({502, 503, 504})
"""Answers of a server, or of a proxy before it, that cannot serve now."""


@dataclass(slots=True, kw_only=True)
class Route:
    """Where the requests of one rollout go."""

    servers: tuple[str, ...]
    """In the order in which they are tried; one that fails becomes the last."""
    min_version: int = 0
    num_failovers: int = 0

    def next(self, avoided: frozenset[str]) -> str | None:
        """The server to try; None when all are to be avoided."""
        return next((server for server in self.servers if server not in avoided), None)

    def fail(self, server: str) -> None:
        """It did not answer."""
        self.servers = (*(other for other in self.servers if other != server), server)
        self.num_failovers += 1


class ManyPools(httpx.AsyncBaseTransport):
    """Spreads requests over many connection pools: httpcore looks through a whole pool at every request and answer, so
    that one pool under thousands of rollouts would keep the event loop busy with nothing else."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S)
        context = httpx.create_ssl_context()
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=limits) for _ in range(NUM_POOLS)]
        self._turn = itertools.cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turn).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class Failover(httpx.AsyncBaseTransport):
    """Sends each request along its rollout's route."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        base_urls: Sequence[str],
        *,
        retry_s: float,
        route_of: Callable[[httpx.Request], Route | None],
    ) -> None:
        """Requests come addressed to `base_urls[0]`. `retry_s`: how long one that no server takes is tried again."""
        self._inner = inner
        self._base_urls = tuple(base_urls)
        self._retry_s = retry_s
        self._route_of = route_of
        self._avoided: frozenset[str] = frozenset()
        self._under_way: defaultdict[str, set[asyncio.Task[httpx.Response]]] = defaultdict(set)

    def avoid(self, servers: frozenset[str]) -> None:
        """Send nothing to these servers, and send what they have not answered to others."""
        self._avoided = servers
        for server in servers:
            for task in self._under_way[server]:
                task.cancel()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        route = self._route_of(request) or Route(servers=self._base_urls)
        clock = asyncio.get_running_loop().time
        give_up_at, pause_s, num_tries, num_errors = None, FIRST_PAUSE_S, 0, 0
        outcome: httpx.Response | httpx.TransportError = httpx.ConnectError("every server is lost")
        while True:
            server = route.next(self._avoided)
            if server is not None:
                num_tries += 1
                outcome = await self._attempt(server, request, body, route.min_version)
                if isinstance(outcome, httpx.Response) and not _may_be_better_elsewhere(outcome):
                    return outcome
                route.fail(server)
                num_errors += isinstance(outcome, httpx.Response) and outcome.status_code not in _UNAVAILABLE
            give_up_at = clock() + self._retry_s if give_up_at is None else give_up_at
            was_all = num_tries >= len(route.servers)
            if (was_all and num_errors >= MAX_ERRORS) or ((was_all or server is None) and clock() >= give_up_at):
                route.num_failovers -= server is not None  # it is not sent again
                return _or_raise(outcome)
            if server is None or num_tries % len(route.servers) == 0:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _attempt(
        self, server: str, request: httpx.Request, body: bytes, min_version: int
    ) -> httpx.Response | httpx.TransportError:
        """The whole answer of one server, or why there is none."""
        task = asyncio.create_task(self._exchange(self._addressed(server, request, body, min_version)))
        self._under_way[server].add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._under_way[server].discard(task)
            task.cancel()
        if task.cancelled():
            return httpx.ReadError(f"the server at {server} was lost", request=request)
        error = task.exception()
        if isinstance(error, httpx.TransportError):
            return error
        return task.result()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    def _addressed(self, server: str, request: httpx.Request, body: bytes, min_version: int) -> httpx.Request:
        path = str(request.url).removeprefix(_root(self._base_urls[0]))
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
        headers.append((MIN_VERSION_HEADER.encode(), str(min_version).encode()))
        return httpx.Request(
            request.method, _root(server) + path, headers=headers, content=body, extensions=request.extensions
        )


@functools.cache
def _root(address: str) -> str:
    """The address without its /v1, as httpx spells it."""
    return str(httpx.URL(address)).rstrip("/").removesuffix("/v1")


def _may_be_better_elsewhere(response: httpx.Response) -> bool:
    return response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR


def _or_raise(outcome: httpx.Response | httpx.TransportError) -> httpx.Response:
    if isinstance(outcome, httpx.TransportError):
        raise outcome
    return outcome
