"""The routes beside generation: health, pause, resume and new weights."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.errors import ArtifactError, ModelError
from prime_rl.inference.http import HttpError, json_response, read_json
from prime_rl.inference.requests import parse
from prime_rl.inference.service import Service
from prime_rl.logs import get_logger
from prime_rl.transport import manifest
from prime_rl.transport.api import HealthResponse, ServedWeights, StatusResponse, UpdateWeightsRequest

logger = get_logger(__name__)


async def health(request: Request) -> Response:
    """200 while requests can be answered, else 503 with the reason and when to ask again."""
    service: Service = request.app.state.service
    service.check_health()
    return json_response(HealthResponse(version=service.backend.stats().version, digest=None, instance="").model_dump())


async def pause(request: Request) -> Response:
    """Generate nothing until resumed; requests in flight are kept, and so is the cache (vLLM's mode `keep`)."""
    service: Service = request.app.state.service
    if request.query_params.get("mode", "keep") != "keep":
        raise HttpError("this server pauses with mode=keep only: requests in flight are kept", param="mode")
    await service.backend.pause()
    return json_response(StatusResponse(status="paused").model_dump())


async def resume(request: Request) -> Response:
    """Go on generating."""
    service: Service = request.app.state.service
    await service.backend.resume()
    return json_response(StatusResponse(status="resumed").model_dump())


async def update_weights(request: Request) -> Response:
    """Swap in the weights of a published directory between two decode steps; requests in flight go on with them.

    It runs to its end even if the client goes away, and one update at a time.
    """
    service: Service = request.app.state.service
    body = parse(await read_json(request), UpdateWeightsRequest)
    return await asyncio.shield(_update(service, body))


async def _update(service: Service, body: UpdateWeightsRequest) -> Response:
    directory = Path(body.weight_dir)
    async with service.update_lock:
        try:
            digest = manifest.digest(directory)
            await service.backend.update_weights(directory, body.version)
        except (ArtifactError, ModelError, OSError) as error:
            raise HttpError(f"cannot load weights {body.version}: {error}", param="weight_dir") from error
    logger.info("Serving weights %d from %s", body.version, directory)
    return json_response(ServedWeights(version=body.version, digest=digest).model_dump())
