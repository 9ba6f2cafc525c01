"""The routes that tell of the model: its name, the token ids of a prompt, the server's metrics."""

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.chat import render
from prime_rl.inference.http import HttpError, json_response, read_json
from prime_rl.inference.metrics import exposition
from prime_rl.inference.requests import TokenizeRequest, parse
from prime_rl.inference.service import Service


async def models(request: Request) -> Response:
    """The one model that is served."""
    service: Service = request.app.state.service
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "prime-rl",
        "root": service.model_root,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "permission": [],
    }
    return json_response({"object": "list", "data": [card]})


async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or of messages."""
    service: Service = request.app.state.service
    body = parse(await read_json(request), TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        ids = await render(service, body)
    else:
        add_special_tokens = body.add_special_tokens is not False
        ids = await service.tokenizer.encode_aside(body.prompt, add_special_tokens=add_special_tokens)
    strings = [service.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(exposition(service.registry), media_type="text/plain; version=0.0.4; charset=utf-8")
