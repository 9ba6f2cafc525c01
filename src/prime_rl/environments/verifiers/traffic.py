"""The HTTP client that verifiers' clients send through: it notes which weights sampled each token.

The server adds `versions` to every choice. verifiers drops fields that it does not know, so they are read off the wire
here, and found again by the session id that both APIs of verifiers put into a header (the rollout's trajectory id).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import httpx
import msgspec
from openai import AsyncOpenAI
from renderers import Renderer, create_renderer
from renderers.base import load_tokenizer
from renderers.configs import DefaultRendererConfig
from transformers import PreTrainedTokenizerFast

from prime_rl.environments.rollouts import EnvironmentSpec

SESSION_HEADER: Final = "X-Session-ID"
CONNECT_TIMEOUT_S: Final = 60.0
"""Generous: a server that is gone refuses at once, and one that is merely starved of CPU accepts late."""
NUM_POOLS: Final = 32
KEEPALIVE_EXPIRY_S: Final = 2.0
"""Less than the 5 s after which uvicorn closes idle connections: a request sent into a closing one would fail."""


# Sessions of the rollout that runs in the current task.
_sessions: ContextVar[list[str]] = ContextVar("_sessions")


class _Question(msgspec.Struct):
    token_ids: list[int] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    versions: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class Traffic:
    """Versions of the sampled tokens, by session, length of the prompt, and the sampled tokens themselves."""

    def __init__(self) -> None:
        self._sampled: dict[str, dict[tuple[int, ...], list[int]]] = {}

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Around one rollout: what is noted of the sessions that it opens is forgotten, however it ends."""
        sessions: list[str] = []
        token = _sessions.set(sessions)
        try:
            yield
        finally:
            _sessions.reset(token)
            for session in sessions:
                self._sampled.pop(session, None)

    def open(self, session: str) -> None:
        """Note what the session of the rollout that runs in this task samples; again is no harm."""
        if session not in self._sampled:
            self._sampled[session] = {}
            _sessions.get().append(session)

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
        for choice in answer.choices:
            if choice.versions is not None and len(choice.versions) == len(choice.token_ids):
                key = (num_prompt, *choice.token_ids)
                # Samples that nothing tells apart count as old as the older one, token by token.
                sampled[key] = list(map(min, choice.versions, sampled.get(key, choice.versions)))

    def versions(self, session: str, num_prompt: int, completion_ids: list[int], *, at_dispatch: int) -> list[int]:
        """Version of each token sampled after `num_prompt` others; `at_dispatch` where the server did not tell."""
        noted = self._sampled.get(session, {}).get((num_prompt, *completion_ids))
        return list(noted) if noted is not None else [at_dispatch] * len(completion_ids)


class _ManyPools(httpx.AsyncBaseTransport):
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


def openai_client(spec: EnvironmentSpec, traffic: Traffic) -> AsyncOpenAI:
    """A client of the inference server whose answers pass by `traffic`.

    It never retries: a failed request fails its rollout, which the orchestrator sees, counts and dispatches again.
    """
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(spec.request_timeout_s, connect=CONNECT_TIMEOUT_S),
        transport=_ManyPools(),
        event_hooks={"response": [traffic.note]},
    )
    return AsyncOpenAI(
        base_url=spec.base_url,
        api_key=os.environ.get(spec.api_key_var) or "EMPTY",
        default_headers=spec.headers,
        max_retries=0,
        http_client=cast(Any, http),  # newer versions are typed for httpx2, and take httpx as renderers does
    )


def load_renderer(model: str) -> Renderer:
    """The renderer (messages to token ids, and back) of a model.

    A local directory holds its own chat template, and renderers would look for its name among those it knows, not find
    it, and import torch on the way to the same answer. So the answer is given.
    """
    if os.path.isfile(os.path.join(model, "tokenizer.json")):
        return create_renderer(PreTrainedTokenizerFast.from_pretrained(model), DefaultRendererConfig())
    return create_renderer(load_tokenizer(model))
