"""Administration of a server, alike for both backends: is it well, which weights does it serve, take these, wait.

    GET  /health                   200 with version, digest, instance and paused; 503 once the engine has failed
    GET  /weights                  a checksum of every tensor that is served
    POST /update_weights           swap in a published directory; requests in flight go on
    POST /reload_weights           go back to the model that the server was started with
    POST /pause, /resume           hold generation, keep requests and cache
    POST /init_weight_transfer     join the trainer's NCCL group

The routes know HTTP and do one thing at a time; an `Administration` knows its engine, and proves that what is served is
what was published. The routes answer their own errors, so that any Starlette application can carry them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prime_rl import activity
from prime_rl.errors import ArtifactError, InferenceError, ModelError
from prime_rl.inference.backend import EngineFailed
from prime_rl.inference.http import HttpError, error_response, json_response, read_json
from prime_rl.inference.requests import parse
from prime_rl.logs import get_logger
from prime_rl.transport.api import (
    HealthResponse,
    InitTransferRequest,
    ServedWeights,
    StatusResponse,
    UpdateWeightsRequest,
    WeightsResponse,
)

logger = get_logger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Administration(Protocol):
    """What the routes need of a backend. All methods are called on the server's event loop."""

    instance: str
    """Random id of this start of the server."""

    lock: asyncio.Lock
    """Held by the routes during `update`, `reload`, `tensors`, `pause` and `resume`: these come one at a time."""

    def failure(self) -> str | None:
        """Why the engine has stopped; None while it works."""
        ...

    def served(self) -> ServedWeights:
        """The weights in use: version 0 and no digest before the first update and after `reload`. No I/O."""
        ...

    def paused(self) -> bool:
        """Whether nothing is sampled until `resume`. No I/O."""
        ...

    async def update(self, directory: Path, version: int) -> ServedWeights:
        """Swap in what `directory` holds and check that every tensor arrived; requests in flight go on with it.

        Raises: ArtifactError or ModelError where it is refused and nothing has changed; InferenceError or EngineFailed
        where it went wrong after it began, and then `failure` says so from now on.
        """
        ...

    async def reload(self) -> ServedWeights:
        """Swap in the model that the server was started with, as version 0. Raises as `update`."""
        ...

    async def tensors(self) -> dict[str, str]:
        """Hugging Face name -> `transport.checksum.checksum` of the tensor that is served now."""
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`; requests and cache are kept."""
        ...

    async def resume(self) -> None: ...

    async def open_transfer(self, request: InitTransferRequest) -> None:
        """Join the trainer's group. Raises: InferenceError where this backend cannot, or nobody came in time."""
        ...


def routes() -> list[Route]:
    """The routes, over `request.app.state.administration`."""
    return [
        Route("/health", _answering(health), methods=["GET"]),
        Route("/weights", _answering(weights), methods=["GET"]),
        Route("/update_weights", _answering(update_weights), methods=["POST"]),
        Route("/reload_weights", _answering(reload_weights), methods=["POST"]),
        Route("/pause", _answering(pause), methods=["POST"]),
        Route("/resume", _answering(resume), methods=["POST"]),
        Route("/init_weight_transfer", _answering(init_weight_transfer), methods=["POST"]),
    ]


async def health(request: Request) -> Response:
    """200 while requests can be answered, else 503 with the reason and when to ask again."""
    administration = _administration(request)
    failure = administration.failure()
    if failure is not None:
        raise HttpError(failure, status=503)
    served = administration.served()
    answer = HealthResponse(
        version=served.version,
        digest=served.digest,
        instance=administration.instance,
        paused=administration.paused(),
    )
    return _json(answer)


async def weights(request: Request) -> Response:
    """A checksum of every tensor; reads all of them, and generation goes on meanwhile."""
    administration = _administration(request)
    async with administration.lock:
        tensors = await administration.tensors()
        served = administration.served()
    return _json(WeightsResponse(version=served.version, digest=served.digest, tensors=tensors))


async def update_weights(request: Request) -> Response:
    """Swap in the weights of a published directory. It runs to its end even if the client goes away."""
    body = parse(await read_json(request), UpdateWeightsRequest)
    return await asyncio.shield(_update(_administration(request), Path(body.weight_dir), body.version))


async def _update(administration: Administration, directory: Path, version: int) -> Response:
    async with administration.lock:
        try:
            with activity.doing(f"loading weights {version}"):
                served = await administration.update(directory, version)
        except (ArtifactError, ModelError, OSError) as error:
            raise HttpError(f"cannot load weights {version}: {error}", param="weight_dir") from error
    logger.info("Serving weights %d from %s", served.version, directory)
    return _json(served)


async def reload_weights(request: Request) -> Response:
    """Serve the model that the server was started with, as version 0."""
    return await asyncio.shield(_reload(_administration(request)))


async def _reload(administration: Administration) -> Response:
    async with administration.lock:
        try:
            served = await administration.reload()
        except (ArtifactError, ModelError, OSError) as error:
            raise HttpError(f"cannot reload the model that the server was started with: {error}") from error
    logger.info("Serving the weights that the server was started with")
    return _json(served)


async def pause(request: Request) -> Response:
    """Generate nothing until resumed; requests in flight are kept, and so is the cache (vLLM's mode `keep`)."""
    if request.query_params.get("mode", "keep") != "keep":
        raise HttpError("this server pauses with mode=keep only: requests in flight are kept", param="mode")
    administration = _administration(request)
    async with administration.lock:
        await administration.pause()
    return _json(StatusResponse(status="paused"))


async def resume(request: Request) -> Response:
    """Go on generating."""
    administration = _administration(request)
    async with administration.lock:
        await administration.resume()
    return _json(StatusResponse(status="resumed"))


async def init_weight_transfer(request: Request) -> Response:
    """Join the trainer's NCCL group; answers when all of its members are there."""
    body = parse(await read_json(request), InitTransferRequest)
    try:
        await _administration(request).open_transfer(body)
    except InferenceError as error:
        raise HttpError(f"no NCCL transfer: {error}") from error
    return _json(StatusResponse(status="connected"))


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with its errors as answers."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HttpError as error:
            return error_response(error.message, status=error.status, param=error.param)
        except (InferenceError, EngineFailed) as error:
            return error_response(str(error), status=503)

    return answer


def _administration(request: Request) -> Administration:
    administration: Administration = request.app.state.administration
    return administration


def _json(answer: BaseModel) -> Response:
    return json_response(answer.model_dump())
