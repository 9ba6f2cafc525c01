import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from prime_rl.inference.gate import BearerKey, BodyLimit, MinVersion, OnlyRoutes
from prime_rl.transport.api import MIN_VERSION_HEADER, ErrorResponse

GENERATE = "/inference/v1/generate"


async def say_hi(websocket):
    await websocket.accept()
    await websocket.send_text("hi")
    await websocket.close()


def app():
    async def ok(request):
        return PlainTextResponse("ok")

    return Starlette(
        routes=[
            WebSocketRoute("/v1/realtime", say_hi),
            Mount("/", routes=[Route("/{path:path}", ok, methods=["GET", "POST"])]),
        ]
    )


def client_of(gated):
    return httpx.AsyncClient(transport=httpx.ASGITransport(gated), base_url="http://server")


async def test_the_key_is_asked_of_every_route_but_health():
    async with client_of(BearerKey(app(), "s3cret")) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/")).status_code == 401
        assert (await client.get("/anything")).status_code == 401
        assert (await client.get("/anything", headers={"Authorization": "Bearer s3cret"})).status_code == 200


def test_a_websocket_without_the_key_is_closed_before_it_opens():
    client = TestClient(BearerKey(app(), "s3cret"))
    with pytest.raises(WebSocketDisconnect) as refusal, client.websocket_connect("/v1/realtime"):
        pass
    assert refusal.value.code == 1008
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer s3cret"}) as websocket:
        assert websocket.receive_text() == "hi"


@pytest.mark.parametrize(("asked", "status"), [("0", 200), ("3", 200), ("4", 503), ("100", 503)])
async def test_older_weights_than_asked_for_do_not_sample(asked, status):
    async with client_of(MinVersion(app(), lambda: 3)) as client:
        answer = await client.post(GENERATE, headers={MIN_VERSION_HEADER: asked})
    assert answer.status_code == status
    if status == 503:
        assert answer.headers["retry-after"] == "1"
        assert "weights 3" in ErrorResponse.model_validate_json(answer.content).error.message


async def test_only_generation_asks_for_a_version():
    async with client_of(MinVersion(app(), lambda: 0)) as client:
        for route in ("/v1/models", "/health", "/update_weights"):
            assert (await client.get(route, headers={MIN_VERSION_HEADER: "9"})).status_code == 200
        for route in ("/v1/chat/completions", "/v1/completions", GENERATE, "/v1/generate"):
            assert (await client.post(route)).status_code == 200
            assert (await client.post(route, headers={MIN_VERSION_HEADER: "9"})).status_code == 503


@pytest.mark.parametrize("asked", ["", "new", "-1", "1.5", "9" * 30])
async def test_a_version_that_is_no_number_is_a_400(asked):
    async with client_of(MinVersion(app(), lambda: 3)) as client:
        answer = await client.post(GENERATE, headers={MIN_VERSION_HEADER: asked})
    assert answer.status_code == 400
    assert MIN_VERSION_HEADER in answer.json()["error"]["message"]


async def swallow(scope, receive, send):
    """An application that reads the whole body and answers with its length."""
    length = 0
    while (message := await receive())["type"] == "http.request":
        length += len(message["body"])
        if not message["more_body"]:
            break
    else:
        raise ClientDisconnect
    await PlainTextResponse(str(length))(scope, receive, send)


async def pieces(size):
    for _ in range(size):
        yield b"x" * 1024


@pytest.mark.parametrize("in_pieces", [True, False])
async def test_a_body_within_the_limit_passes_and_a_larger_one_is_refused(in_pieces):
    app = BodyLimit(swallow, max_bytes=2**20)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        whole = await client.post("/", content=pieces(1024) if in_pieces else b"x" * 2**20)
        assert (whole.status_code, whole.text) == (200, str(2**20))
        larger = await client.post("/", content=pieces(1025) if in_pieces else b"x" * (2**20 + 1))
    assert larger.status_code == 413
    assert larger.json()["error"]["message"] == "the request body is larger than 1 MiB"


async def test_only_the_routes_of_the_contract_are_there():
    async with client_of(OnlyRoutes(app(), {"/health", GENERATE})) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(GENERATE)).status_code == 200
        for path in ("/v1/responses", "/v1/chat/completions/batch", "/generative_scoring", "/health/", f"{GENERATE}/x"):
            answer = await client.post(path)
            assert answer.status_code == 404
            error = ErrorResponse.model_validate_json(answer.content).error
            assert error.message == f"POST {path}: this server has no such route; it serves /health, {GENERATE}"


def test_a_websocket_is_no_route_of_the_contract():
    client = TestClient(OnlyRoutes(app(), {"/v1/realtime"}))
    with pytest.raises(WebSocketDisconnect) as refusal, client.websocket_connect("/v1/realtime"):
        pass
    assert refusal.value.code == 1008
