"""The orchestrator's and evaluation's client of the inference server: health, weights, pause. No generation.

Generation goes from the environment workers straight to the server. Every wait has a deadline and says for what.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from prime_rl.config.shared import ClientConfig
from prime_rl.errors import InferenceError
from prime_rl.logs import get_logger
from prime_rl.transport.api import ErrorResponse, HealthResponse, UpdateWeightsRequest, UpdateWeightsResponse
from prime_rl.transport.manifest import digest

Answer = TypeVar("Answer", bound=BaseModel)

PROBE_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
NOTICE_INTERVAL_S: Final = 15.0
ENGINE_FAILED: Final = "the inference engine failed"
"""How a server of ours begins the reason of a state that only starting it again ends."""

_logger = get_logger(__name__)


class InferenceClient:
    """Administers one server. Made by `open_client`."""

    def __init__(self, config: ClientConfig, http: httpx.AsyncClient) -> None:
        self.base_url = config.base_url[0].rstrip("/")
        self._config = config
        self._http = http

    async def health(self) -> int | None:
        """Version of the weights that the server serves; None when it does not answer, or not that it is well."""
        state = await self._probe()
        return state if isinstance(state, int) else None

    async def wait_ready(self, timeout: float) -> int:
        """Wait until the server is well; returns the version it serves. `timeout` is seconds.

        Raises: InferenceError saying for how long it waited for which address, and what the server said; at once when
            its engine has failed.
        """
        start = time.monotonic()
        next_notice = start + NOTICE_INTERVAL_S
        url = self._root("/health")
        while not isinstance(state := await self._probe(), int):
            now = time.monotonic()
            if state is not None and state.startswith(ENGINE_FAILED):
                raise InferenceError(f"the server at {url} says: {state}; look at its log, and start it again")
            if now - start >= timeout and state is not None:
                raise InferenceError(f"the server at {url} is not well after {timeout:g} s: {state}; look at its log")
            if now - start >= timeout:
                raise InferenceError(
                    f"no inference server answered at {url} within {timeout:g} s; look at its log, "
                    "or correct client.base_url"
                )
            if now >= next_notice:
                _logger.info("Waiting for the inference server at %s since %.0f s", self.base_url, now - start)
                next_notice += NOTICE_INTERVAL_S
            await asyncio.sleep(POLL_S)
        return state

    async def check_model(self, name: str) -> None:
        """Raises: InferenceError when the server serves other models than `name` (`skip_model_check`: never)."""
        if self._config.skip_model_check:
            return
        response = await self._request("GET", f"{self.base_url}/models")
        models = [card.get("id") for card in response.json().get("data", [])]
        if name not in models:
            raise InferenceError(
                f"the server at {self.base_url} serves {', '.join(map(str, models)) or 'no model'}, not {name}; "
                "start it with the same model name"
            )

    async def update_weights(self, directory: Path, version: int) -> None:
        """Swap in the weights that the trainer published in `directory`.

        Raises: ArtifactError when the directory is incomplete; InferenceError when the server refuses, cannot be
        reached, or read other bytes than those that its marker names.
        """
        expected = digest(directory)
        body = UpdateWeightsRequest(weight_dir=_absolute(directory), version=version)
        response = await self._request("POST", self._root("/update_weights"), json=body.model_dump())
        answer = self._parse(response, UpdateWeightsResponse)
        if answer.digest != expected or answer.version != version:
            raise InferenceError(
                f"the server at {self.base_url} answered with weights {answer.version} of digest {answer.digest} when "
                f"asked for {version} of digest {expected}: does it see the same {directory}?"
            )

    async def pause(self) -> None:
        """Stop generating; requests in flight are kept."""
        await self._request("POST", self._root("/pause"))

    async def resume(self) -> None:
        """Go on generating."""
        await self._request("POST", self._root("/resume"))

    async def _probe(self) -> int | str | None:
        """Version of the weights that the server serves; what it says is wrong; None when it does not answer."""
        try:
            response = await self._http.get(self._root("/health"), timeout=PROBE_TIMEOUT_S)
        except httpx.TransportError:
            return None
        if response.status_code == httpx.codes.OK:
            return self._parse(response, HealthResponse).version
        try:
            return ErrorResponse.model_validate_json(response.content).error.message
        except ValidationError:
            return f"it answered {response.status_code}"

    def _root(self, path: str) -> str:
        return self.base_url.removesuffix("/v1") + path

    async def _request(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, url, **arguments)
        except httpx.TransportError as error:
            raise InferenceError(f"{method} {url} failed: {type(error).__name__}: {error}") from error
        if response.is_error:
            hint = ""
            if response.status_code == httpx.codes.UNAUTHORIZED:
                hint = f"; put the server's key into the environment variable {self._config.api_key_var}"
            raise InferenceError(f"{method} {url} answered {response.status_code}: {response.text[:500]}{hint}")
        return response

    def _parse(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise InferenceError(
                f"{response.url} answered something else than a server of prime-rl: {error}"
            ) from error


def _absolute(directory: Path) -> str:
    """The server may run in another working directory."""
    return str(directory.resolve())


@asynccontextmanager
async def open_client(config: ClientConfig) -> AsyncIterator[InferenceClient]:
    """A client for the duration of the block."""
    key = os.environ.get(config.api_key_var)
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | config.headers
    timeout = httpx.Timeout(config.timeout, connect=CONNECT_TIMEOUT_S)
    # Every request has a connection of its own: there are few, and one sent into a connection that the server closes
    # for being idle would fail.
    limits = httpx.Limits(max_keepalive_connections=0)
    # No proxy of the surroundings: it could not reach a server on this machine. Certificates of the surroundings count.
    verify = httpx.create_ssl_context()
    async with httpx.AsyncClient(
        headers=headers, timeout=timeout, limits=limits, verify=verify, trust_env=False
    ) as http:
        yield InferenceClient(config, http)
