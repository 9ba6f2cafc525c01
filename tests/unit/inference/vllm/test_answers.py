import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from prime_rl.inference.vllm.answers import OlderNames, SayVersions, with_versions
from prime_rl.inference.vllm.versions import ANSWER, Answer, Choice, Prompt


def sampled(version, num_tokens):
    return Prompt(1, {0: Choice("r", [(0, version)], num_tokens=num_tokens)})


async def generate(request):
    answer = ANSWER.get()
    if answer is not None:
        answer.prompts.append(sampled(3, 5))
    return JSONResponse({"choices": [{"text": "}"}]})


async def stream(request):
    return StreamingResponse(iter([b"data: {}\n\n", b"data: [DONE]\n\n"]), media_type="text/event-stream")


async def in_pieces(request):
    ANSWER.get().prompts.append(sampled(1, 2))
    return StreamingResponse(iter([b'{"a"', b": 1}\n"]), media_type="application/json")


async def dropped(request):
    ANSWER.get().prompts += [sampled(1, 2), Prompt(1, is_dropped=True)]
    return JSONResponse({"choices": [{"finish_reason": "abort"}]})


async def bad(request):
    return JSONResponse({"error": {"message": "no"}}, status_code=400)


async def dead(request):
    return Response(status_code=500)


@pytest.fixture
def reason():
    return []


@pytest.fixture
async def http(reason):
    routes = [
        Route("/inference/v1/generate", generate, methods=["POST"]),
        Route("/v1/completions", in_pieces, methods=["POST"]),
        Route("/v1/chat/completions", stream, methods=["POST"]),
        Route("/v1/models", generate, methods=["POST"]),
    ]
    app = OlderNames(SayVersions(Starlette(routes=routes), lambda: reason[0] if reason else None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/generate"])
async def test_a_json_answer_says_its_versions_last(http, path):
    answer = await http.post(path)
    assert answer.json() == {"choices": [{"text": "}"}], "versions": [[[3, 5]]]}
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_an_answer_that_comes_in_pieces_is_put_together(http):
    answer = await http.post("/v1/completions")
    assert answer.json() == {"a": 1, "versions": [[[1, 2]]]}
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_streams_and_other_routes_are_left_alone(http):
    assert (await http.post("/v1/chat/completions")).content == b"data: {}\n\ndata: [DONE]\n\n"
    assert (await http.post("/v1/models")).json() == {"choices": [{"text": "}"}]}
    assert ANSWER.get() is None


@pytest.mark.parametrize(("endpoint", "status"), [(bad, 400), (dead, 500)])
async def test_errors_of_a_request_pass_as_they_are(endpoint, status):
    app = SayVersions(Starlette(routes=[Route("/v1/completions", endpoint)]), lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answer = await client.get("/v1/completions")
    assert answer.status_code == status
    assert b"versions" not in answer.content


@pytest.mark.parametrize("endpoint", [generate, dead])
async def test_what_an_ended_engine_answers_is_a_503_that_says_why(endpoint):
    app = SayVersions(Starlette(routes=[Route("/v1/completions", endpoint)]), lambda: "the engine is out of magic")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answer = await client.get("/v1/completions")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine is out of magic"
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"versions":[]}'),
        (b"{ }", b'{ "versions":[]}'),
        (b'{"a":1}\n', b'{"a":1,"versions":[]}'),
        (b"[1]", b"[1]"),
        (b"", b""),
    ],
)
def test_only_objects_get_a_key_more(body, expected):
    assert with_versions(body, Answer()) == expected


async def test_an_answer_that_new_weights_ended_tells_to_ask_again():
    app = SayVersions(Starlette(routes=[Route("/v1/completions", dropped, methods=["POST"])]), lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answer = await client.post("/v1/completions")
    assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
    assert "ask again" in answer.json()["error"]["message"]
