"""The application: every route, the key that they ask for, and how failures are answered.

GET  /v1/models, /metrics, /openapi.json
POST /v1/chat/completions, /v1/completions         text out
POST /inference/v1/generate, /v1/generate          token ids in and out
POST /tokenize
/health, /update_weights, /pause, ...              `admin`; /health needs no key
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prime_rl.inference import admin, info
from prime_rl.inference.backend import EngineFailed, RequestError
from prime_rl.inference.chat import chat_completions
from prime_rl.inference.completions import completions
from prime_rl.inference.gate import BearerKey, MinVersion
from prime_rl.inference.generate import generate
from prime_rl.inference.http import HttpError, error_response
from prime_rl.inference.openapi import openapi
from prime_rl.inference.service import Service


def build_app(service: Service, api_key: str | None) -> Starlette:
    """The application; it does not own the backend."""
    routes = [
        *admin.routes(),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/v1/generate", generate, methods=["POST"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
    ]
    keys = [Middleware(BearerKey, key=api_key)] if api_key else []
    app = Starlette(
        routes=routes,
        middleware=[*keys, Middleware(MinVersion, served=lambda: service.backend.stats().version)],
        exception_handlers={
            HttpError: _on_http_error,
            RequestError: _on_request_error,
            EngineFailed: _on_engine_failure,
            HTTPException: _on_routing_error,
            Exception: _on_failure,
        },
    )
    app.state.service = service
    app.state.administration = service.administration
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(error.message, status=error.status, param=error.param)


async def _on_request_error(request: Request, error: Exception) -> Response:
    return error_response(str(error), status=400)


async def _on_engine_failure(request: Request, error: Exception) -> Response:
    return error_response(str(error), status=503)


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_response(message, status=error.status_code)
    answer.headers.update(error.headers or {})  # which methods there are
    return answer


async def _on_failure(request: Request, error: Exception) -> Response:
    """Answer what nobody expected; Starlette raises it again, so that it is logged with its traceback."""
    return error_response(f"the server failed: {type(error).__name__}: {error}", status=500)
