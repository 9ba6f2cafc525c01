"""The HTTP client that verifiers' clients send through: it notes which weights sampled each token, and sends each
request to its rollout's server.

The server adds `versions` to every answer. verifiers drops fields that it does not know, so they are read off the wire
here, and found again by the session id that both APIs of verifiers put into a header (the rollout's trajectory id).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import httpx
import msgspec
from openai import AsyncOpenAI

from prime_rl.environments.rollouts import EnvironmentSpec, RolloutRequest
from prime_rl.environments.verifiers.failover import CONNECT_TIMEOUT_S, Failover, ManyPools, Route

SESSION_HEADER: Final = "X-Session-ID"


# Route and sessions of the rollout that runs in the current task.
_current: ContextVar[tuple[Route, list[str]]] = ContextVar("_current")


class _Question(msgspec.Struct):
    token_ids: list[int] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    versions: list[list[tuple[int, int]]] = []
    """`transport.api.VersionRuns` of every choice."""


class Traffic:
    """Versions of the sampled tokens, by session, length of the prompt, and the sampled tokens themselves."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.transport = Failover(ManyPools(), spec.base_urls, retry_s=spec.retry_s, route_of=self._route_of)
        self._base_urls = spec.base_urls
        self._sampled: dict[str, dict[tuple[int, ...], list[int]]] = {}
        self._failed: dict[str, dict[bytes, Exception]] = {}
        self._routes: dict[str, Route] = {}

    @contextmanager
    def rollout(self, request: RolloutRequest) -> Iterator[Route]:
        """Around one rollout: what is noted of the sessions that it opens is forgotten, however it ends."""
        sessions: list[str] = []
        route = Route(servers=request.servers or self._base_urls, min_version=request.version)
        token = _current.set((route, sessions))
        try:
            yield route
        finally:
            _current.reset(token)
            for session in sessions:
                self._sampled.pop(session, None)
                self._failed.pop(session, None)
                self._routes.pop(session, None)

    def open(self, session: str) -> None:
        """Note what the session of the rollout that runs in this task samples; again is no harm."""
        current = _current.get(None)
        if session not in self._sampled and current is not None:
            self._sampled[session] = {}
            self._routes[session], sessions = current
            sessions.append(session)

    async def note(self, response: httpx.Response) -> None:
        """Response hook of the HTTP client."""
        session = response.request.headers.get(SESSION_HEADER)
        sampled = self._sampled.get(session or "")
        if sampled is None or response.status_code != httpx.codes.OK:
            return
        try:
            answer = msgspec.json.decode(await response.aread(), type=_Answer)
            num_prompt = len(msgspec.json.decode(await response.request.aread(), type=_Question).token_ids)
        except msgspec.MsgspecError:
            return  # not a generate answer, or a broken one: verifiers' client judges that
        for choice, runs in zip(answer.choices, answer.versions, strict=False):
            versions = [version for version, count in runs for _ in range(count)]
            if len(versions) == len(choice.token_ids):
                key = (num_prompt, *choice.token_ids)
                # Samples that nothing tells apart count as old as the older one, token by token.
                sampled[key] = list(map(min, versions, sampled.get(key, versions)))

    def note_failed(self, session: str, call: bytes, error: Exception) -> None:
        """A model call of the session failed; `call` names its messages."""
        if session in self._sampled:
            self._failed.setdefault(session, {})[call] = error

    def note_answered(self, session: str, call: bytes) -> None:
        """A model call of the session was answered: it does not matter that it had failed before."""
        self._failed.get(session, {}).pop(call, None)

    def failed(self, session: str) -> Exception | None:
        """The first failure of a call that was not answered later."""
        return next(iter(self._failed.get(session, {}).values()), None)

    def versions(
        self, session: str, num_prompt: int, completion_ids: Sequence[int], *, at_dispatch: int
    ) -> tuple[int, ...]:
        """Version of each token sampled after `num_prompt` others; `at_dispatch` where the server did not tell."""
        noted = self._sampled.get(session, {}).get((num_prompt, *completion_ids))
        return tuple(noted) if noted is not None else (at_dispatch,) * len(completion_ids)

    def _route_of(self, request: httpx.Request) -> Route | None:
        return self._routes.get(request.headers.get(SESSION_HEADER, ""))


def openai_client(spec: EnvironmentSpec, traffic: Traffic) -> AsyncOpenAI:
    """A client of the inference servers whose answers pass by `traffic`.

    Failover is below it (`failover`); it never retries: a request that fails all the same fails its rollout, which the
    orchestrator sees, counts and dispatches again.
    """
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(spec.request_timeout_s, connect=CONNECT_TIMEOUT_S),
        transport=traffic.transport,
        event_hooks={"response": [traffic.note]},
    )
    return AsyncOpenAI(
        base_url=spec.base_urls[0],
        api_key=os.environ.get(spec.api_key_var) or "EMPTY",
        default_headers=spec.headers,
        max_retries=0,
        http_client=cast(Any, http),  # newer versions are typed for httpx2, and take httpx as renderers does
    )
