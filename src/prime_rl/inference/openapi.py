"""GET /openapi.json: the routes with their requests and answers, made from the routes and the wire types themselves."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prime_rl.inference.gate import GENERATION_ROUTES
from prime_rl.inference.http import json_response
from prime_rl.inference.requests import ChatRequest, CompletionRequest, TokenizeRequest
from prime_rl.transport.api import (
    MIN_VERSION_HEADER,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    HealthResponse,
    InitTransferRequest,
    ServedWeights,
    StatusResponse,
    UpdateWeightsRequest,
    WeightsResponse,
)

TEMPLATE = "#/components/schemas/{model}"

MESSAGES: dict[str, tuple[type[BaseModel] | None, type[BaseModel] | None]] = {
    "/health": (None, HealthResponse),
    "/weights": (None, WeightsResponse),
    "/update_weights": (UpdateWeightsRequest, ServedWeights),
    "/reload_weights": (None, ServedWeights),
    "/pause": (None, StatusResponse),
    "/resume": (None, StatusResponse),
    "/init_weight_transfer": (InitTransferRequest, StatusResponse),
    "/v1/chat/completions": (ChatRequest, None),
    "/v1/completions": (CompletionRequest, None),
    "/inference/v1/generate": (GenerateRequest, GenerateResponse),
    "/v1/generate": (GenerateRequest, GenerateResponse),
    "/tokenize": (TokenizeRequest, None),
}
"""What each route takes and answers, where that is a type of ours; chat and completions answer as OpenAI's API does."""


async def openapi(request: Request) -> Response:
    """This document."""
    return json_response(document(tuple(route for route in request.app.routes if isinstance(route, Route))))


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of some routes."""
    models: list[type[BaseModel]] = [ErrorResponse]
    models += dict.fromkeys(model for pair in MESSAGES.values() for model in pair if model is not None)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=TEMPLATE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "prime-rl inference", "version": "1"},
        "paths": {
            route.path: {
                method.lower(): _operation(route) for method in sorted(route.methods or ()) if method != "HEAD"
            }
            for route in routes
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    request, answer = MESSAGES.get(route.path, (None, None))
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip().split("\n", 1)[0],
        "responses": {
            "200": {"description": "Done"} | ({} if answer is None else _content(answer)),
            "default": {"description": "An error"} | _content(ErrorResponse),
        },
    }
    if request is not None:
        operation["requestBody"] = {"required": True} | _content(request)
    if route.path in GENERATION_ROUTES:
        header = {"name": MIN_VERSION_HEADER, "in": "header", "schema": {"type": "integer", "minimum": 0}}
        operation["parameters"] = [header]
    return operation


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": TEMPLATE.format(model=model.__name__)}}}}
