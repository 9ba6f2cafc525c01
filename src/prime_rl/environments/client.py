"""Administration of inference servers by the orchestrator and by evaluations: health, weights, pause. No generation.

Generation goes from the environment workers straight to the servers. Every wait has a deadline and says for what.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from prime_rl import activity
from prime_rl.config.shared import ClientConfig
from prime_rl.disk import no_handles
from prime_rl.errors import DiskError, InferenceError, NoServer
from prime_rl.logs import get_logger
from prime_rl.transport.api import (
    ErrorResponse,
    HealthResponse,
    InitTransferRequest,
    ServedWeights,
    StatusResponse,
    UpdateWeightsRequest,
    WeightsResponse,
)
from prime_rl.transport.manifest import read_manifest

Answer = TypeVar("Answer", bound=BaseModel)

PROBE_TIMEOUT_S: Final = 5.0
PAUSE_TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
NOTICE_INTERVAL_S: Final = 15.0

_logger = get_logger(__name__)


class Unreachable(InferenceError):
    """The server could not be asked: nobody listens, it went away before it answered, or says that it cannot (503)."""


def of_server(owner: str) -> type[InferenceError]:
    """What to raise where the servers called `owner` cannot be used: final, unless the launcher starts them again."""
    return InferenceError if activity.is_supervised(owner) else NoServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwell:
    """What a server that is not well did when it was asked for its health."""

    reason: str
    is_silent: bool = False
    """It took the question and did not answer in time: it hangs, or has much to do."""
    says_so: bool = False
    """It answered, and `reason` is its own."""
    is_ours: bool = False
    """It was not even asked: this process has no connection left for that."""


def why(error: httpx.TransportError) -> str:
    """Why there was no answer, in words."""
    return no_handles(error) or f"{type(error).__name__}: {error}"


class _ModelCard(BaseModel):
    id: str


class _Models(BaseModel):
    """What is read of the answer of /v1/models."""

    data: list[_ModelCard]


class InferenceClient:
    """Administers one server. Made by `open_clients`."""

    def __init__(self, base_url: str, config: ClientConfig, http: httpx.AsyncClient) -> None:
        self.base_url = base_url.rstrip("/")
        self._config = config
        self._http = http

    async def health(self) -> HealthResponse | None:
        """Which weights it serves, and which start of it; None when it does not answer, or not that it is well."""
        state = await self.probe()
        return state if isinstance(state, HealthResponse) else None

    async def probe(self) -> HealthResponse | Unwell:
        """Health, or what is wrong; within `PROBE_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                response = await self._http.get(self._root("/health"), timeout=PROBE_TIMEOUT_S)
        except (TimeoutError, httpx.TimeoutException):
            return Unwell(reason=f"no answer within {PROBE_TIMEOUT_S:g} s", is_silent=True)
        except httpx.TransportError as error:
            is_ours = no_handles(error) is not None
            return Unwell(reason=why(error), is_silent=is_ours, is_ours=is_ours)
        if response.status_code == httpx.codes.OK:
            try:
                return self._parse(response, HealthResponse)
            except InferenceError as error:
                return Unwell(reason=str(error), says_so=True)
        try:
            reason = ErrorResponse.model_validate_json(response.content).error.message
        except ValidationError:
            reason = f"it answered {response.status_code}"
        return Unwell(reason=reason, says_so=True)

    async def wait_ready(self, timeout: float) -> HealthResponse:
        """Wait until the server is well. `timeout` is seconds.

        One whose engine has failed is waited for, too: who watches it, here or elsewhere, starts it again.

        Raises: InferenceError saying for how long it waited for which address, and what the server said; DiskError
            where this process can open no connection: it has none yet, so one that is started again could not either.
        """
        next_notice_s = NOTICE_INTERVAL_S
        with activity.waiting("inference", f"{self.base_url} to serve", deadline_s=timeout) as waiting:
            while isinstance(state := await self.probe(), Unwell):
                if waiting.is_overdue:
                    kind = DiskError if state.is_ours else of_server("inference")
                    raise kind(self.complaint(state, waiting.patience_s))
                if waiting.seconds >= next_notice_s:
                    what = f"the inference server at {self.base_url} since {waiting.seconds:.0f} s"
                    _logger.info("Waiting for %s: %s", what, state.reason)
                    next_notice_s += NOTICE_INTERVAL_S
                await asyncio.sleep(POLL_S)
        return state

    def complaint(self, state: Unwell, timeout: float) -> str:
        """What to say of a server that was not well for `timeout` seconds."""
        url = self._root("/health")
        if state.is_ours:
            return f"the server at {url} could not be asked for {timeout:g} s: {state.reason}"
        if state.says_so:
            return f"the server at {url} is not well after {timeout:g} s: {state.reason}; look at its log"
        return (
            f"no inference server answered at {url} within {timeout:g} s; look at its log, or correct client.base_url"
        )

    async def check_model(self, name: str) -> None:
        """Raises: InferenceError when the server serves other models than `name` (`skip_model_check`: never)."""
        if self._config.skip_model_check:
            return
        response = await self._request("GET", f"{self.base_url}/models", timeout=PAUSE_TIMEOUT_S)
        models = [card.id for card in self._parse(response, _Models).data]
        if name not in models:
            raise of_server("inference")(
                f"the server at {self.base_url} serves {', '.join(models) or 'no model'}, not {name}; "
                "start it with the same model name"
            )

    async def update_weights(self, directory: Path, version: int) -> ServedWeights:
        """Swap in the weights that the trainer published in `directory`, or sends for it.

        Raises: ArtifactError when the directory is incomplete; InferenceError when the server refuses, cannot be
        reached (`Unreachable`), or serves other tensors than those that the directory's marker names.
        """
        published = read_manifest(directory).weights
        body = UpdateWeightsRequest(weight_dir=_absolute(directory), version=version)
        with activity.waiting("inference", f"weights {version} to be loaded", deadline_s=self._config.timeout):
            response = await self._request("POST", self._root("/update_weights"), json=body.model_dump())
        served = self._parse(response, ServedWeights)
        if served.version != version or (published is not None and served.digest != published.digest):
            expected = "" if published is None else f" of digest {published.digest}"
            raise InferenceError(
                f"the server at {self.base_url} answered with weights {served.version} of digest {served.digest} when "
                f"asked for {version}{expected}: does it see the same {directory}?"
            )
        return served

    async def reload_weights(self) -> ServedWeights:
        """Go back to the model that the server was started with, as version 0."""
        with activity.waiting("inference", "its own weights to be loaded", deadline_s=self._config.timeout):
            response = await self._request("POST", self._root("/reload_weights"))
        return self._parse(response, ServedWeights)

    async def weights(self) -> WeightsResponse:
        """A checksum of every tensor that is served."""
        return self._parse(await self._request("GET", self._root("/weights")), WeightsResponse)

    async def metrics(self) -> str:
        """Its metrics in Prometheus' text format. Raises: InferenceError."""
        return (await self._request("GET", self._root("/metrics"), timeout=PROBE_TIMEOUT_S)).text

    async def init_transfer(self, request: InitTransferRequest) -> None:
        """Have the server join the trainer's NCCL group. Raises: InferenceError where it cannot."""
        url = self._root("/init_weight_transfer")
        timeout = request.timeout + CONNECT_TIMEOUT_S
        with activity.waiting("inference", "a server to meet the trainer", deadline_s=timeout):
            response = await self._request("POST", url, json=request.model_dump(), timeout=timeout)
        self._parse(response, StatusResponse)

    async def pause(self) -> None:
        """Stop generating; requests in flight are kept."""
        await self._request("POST", self._root("/pause"), timeout=PAUSE_TIMEOUT_S)

    async def resume(self) -> None:
        """Go on generating."""
        await self._request("POST", self._root("/resume"), timeout=PAUSE_TIMEOUT_S)

    def _root(self, path: str) -> str:
        return self.base_url.removesuffix("/v1") + path

    async def _request(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, url, **arguments)
        except httpx.TransportError as error:
            raise Unreachable(f"{method} {url} failed: {why(error)}") from error
        if response.is_error:
            hint = ""
            if response.status_code == httpx.codes.UNAUTHORIZED:
                hint = f"; put the server's key into the environment variable {self._config.api_key_var}"
            cannot_now = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
            kind = Unreachable if cannot_now else InferenceError
            raise kind(f"{method} {url} answered {response.status_code}: {response.text[:500]}{hint}")
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
async def open_clients(config: ClientConfig) -> AsyncIterator[tuple[InferenceClient, ...]]:
    """A client of every server (`admin_base_url`, else `base_url`), for the duration of the block."""
    async with open_http(config) as http:
        yield tuple(InferenceClient(address, config, http) for address in config.servers)


@asynccontextmanager
async def open_http(config: ClientConfig) -> AsyncIterator[httpx.AsyncClient]:
    """What sends requests as `config` says, with its key and headers, for the duration of the block."""
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
        yield http
