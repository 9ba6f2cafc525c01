"""Bad requests, clients that go away, and an engine that fails, over a real socket."""

import asyncio
import json

import httpx
import pytest

from prime_rl.inference.backend import EngineFailed, RequestError
from prime_rl.transport.api import ErrorResponse

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HI = [{"role": "user", "content": "hi"}]
LONG = "x" * 400
VOCABULARY, END = 263, 260  # of the tokenizer in conftest.py

BAD = {
    "broken JSON": (CHAT, b'{"messages": [', 400, None),
    "NaN": (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, None),
    "infinite": (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, None),
    "not UTF-8": (TEXT, b'{"prompt": "\xff"}', 400, None),
    "half a surrogate": (TEXT, b'{"prompt": "\\ud800"}', 400, None),
    "nested without end": (TEXT, b"[" * 200_000, 400, None),
    "empty body": (TEXT, b"", 400, None),
    "a list": (TEXT, b"[]", 400, None),
    "no messages": (CHAT, {"model": "tiny"}, 400, "messages"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages"),
    "messages of text": (CHAT, {"messages": "hi"}, 400, "messages"),
    "message without role": (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages.0.role"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    "template argument": (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, 400, "messages"),
    "own template": (CHAT, {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
    "both generation prompts": (
        CHAT,
        {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "messages",
    ),
    "a tool without a name": (
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "function": {}}]},
        400,
        "tools.0",
    ),
    "a tool of another type": (CHAT, {"messages": HI, "tools": [{"function": {"name": "f"}}]}, 400, "tools.0"),
    "unknown model": (CHAT, {"messages": HI, "model": "gpt-4"}, 404, "model"),
    "model of the wrong type": (CHAT, {"messages": HI, "model": 3}, 400, "model"),
    "top_logprobs alone": (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    "too many logprobs": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "too long a chat": (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 400, "messages"),
    "no prompt": (TEXT, {}, 400, "prompt"),
    "empty prompt": (TEXT, {"prompt": ""}, 400, "prompt"),
    "empty list of prompts": (TEXT, {"prompt": []}, 400, "prompt"),
    "an empty prompt of two": (TEXT, {"prompt": ["a", ""]}, 400, "prompt"),
    "mixed prompt": (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
    "id outside the vocabulary": (TEXT, {"prompt": [1, 264]}, 400, "prompt"),
    "negative id": (GENERATE, {"token_ids": [-1], "sampling_params": {}}, 400, "token_ids"),
    "huge id": (GENERATE, {"token_ids": [2**70], "sampling_params": {}}, 400, "token_ids"),
    "no ids": (GENERATE, {"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
    "no sampling": (GENERATE, {"token_ids": [1]}, 400, "sampling_params"),
    "sampling of the wrong type": (GENERATE, {"token_ids": [1], "sampling_params": 3}, 400, "sampling_params"),
    "prompt logprobs": (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"prompt_logprobs": 21}},
        400,
        "sampling_params.prompt_logprobs",
    ),
    "generate too long": (GENERATE, {"token_ids": [1] * 256, "sampling_params": {}}, 400, "token_ids"),
    "prompt too long": (TEXT, {"prompt": LONG}, 400, "prompt"),
    "too many tokens asked": (TEXT, {"prompt": "a", "max_tokens": 256}, 400, "max_tokens"),
    "no tokens asked": (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "temperature too high": (TEXT, {"prompt": "a", "temperature": 2.1}, 400, "temperature"),
    "negative temperature": (TEXT, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    "temperature of the wrong type": (TEXT, {"prompt": "a", "temperature": "1"}, 400, "temperature"),
    "top_p of zero": (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    "top_p above one": (TEXT, {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
    "top_k below -1": (TEXT, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    "min_p above one": (TEXT, {"prompt": "a", "min_p": 2}, 400, "min_p"),
    "repetition penalty of zero": (TEXT, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    "repetition penalty of almost zero": (
        TEXT,
        {"prompt": "a", "repetition_penalty": 1e-40},
        400,
        "repetition_penalty",
    ),
    "repetition penalty too high": (TEXT, {"prompt": "a", "repetition_penalty": 101}, 400, "repetition_penalty"),
    "no choices": (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
    "too many choices": (TEXT, {"prompt": ["a", "b"], "n": 600}, 400, "n"),
    "min above max": (TEXT, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    "min_tokens where all tokens but the end of sequence stop": (
        TEXT,
        {"prompt": "a", "min_tokens": 2, "stop_token_ids": [i for i in range(VOCABULARY) if i != END]},
        400,
        None,
    ),
    "empty stop": (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
    "stop id outside": (TEXT, {"prompt": "a", "stop_token_ids": [9999]}, 400, "stop_token_ids"),
    "echo of a chat": (CHAT, {"messages": HI, "echo": True}, 400, "echo"),
    "presence penalty": (TEXT, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    "biases of words": (TEXT, {"prompt": "a", "logit_bias": {"the": 1}}, 400, "logit_bias"),
    "bias of the wrong type": (TEXT, {"prompt": "a", "logit_bias": {"1": "x"}}, 400, "logit_bias.1"),
    "allowed id outside": (TEXT, {"prompt": "a", "allowed_token_ids": [9999]}, 400, "allowed_token_ids"),
    "empty bad word": (TEXT, {"prompt": "a", "bad_words": [""]}, 400, "bad_words"),
    "stream options alone": (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "unknown route": ("/v1/embeddings", {}, 404, None),
    "wrong method": ("/v1/models", {}, 405, None),
}


async def test_every_bad_request_gets_an_openai_error_and_the_server_lives_on(serve, make_backend):
    async with serve(make_backend()) as running:
        wrong = {}
        for name, (route, body, status, param) in BAD.items():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await running.http.post(route, content=content)
            error = ErrorResponse.model_validate_json(answer.content).error
            if (answer.status_code, error.code, error.param) != (status, status, param) or not error.message:
                wrong[name] = (answer.status_code, error)
        assert wrong == {}
        assert running.backend.requests == []
        answer = await running.openai.completions.create(model="tiny", prompt="hi", max_tokens=2)
        assert answer.usage.completion_tokens == 2


async def test_a_request_that_leaves_nothing_to_draw_is_refused_alone(serve, make_backend):
    backend = make_backend()
    async with serve(backend) as running:
        backend.failure = RequestError("leaves nothing to draw")
        whole = await running.http.post(TEXT, json={"prompt": "hi"})
        streamed = await running.http.post(TEXT, json={"prompt": "hi", "stream": True})
    assert whole.status_code == 400
    *_, error, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert json.loads(error)["error"] | {"param": None} == {
        "message": "leaves nothing to draw",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert done == "[DONE]"


async def test_a_body_that_is_too_large_is_refused(serve, make_backend, monkeypatch):
    monkeypatch.setattr("prime_rl.inference.http.MAX_BODY_BYTES", 1000)
    async with serve(make_backend()) as running:
        answer = await running.http.post(TEXT, json={"prompt": "a" * 2000})
    assert answer.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_cancels_its_choices(serve, make_backend, eventually, stream, n):
    backend = make_backend()
    backend.gate.clear()
    async with serve(backend) as running:
        body = {"prompt": "hi", "n": n, "stream": stream, "max_tokens": 100}
        request = asyncio.create_task(running.http.post(TEXT, json=body))
        await eventually(lambda: len(backend.running) == n)
        request.cancel()
        await eventually(lambda: not backend.running)
        assert len(backend.cancelled) == n
        backend.gate.set()
        assert (await running.http.get("/health")).status_code == 200


async def test_a_client_that_goes_away_in_mid_stream_cancels_its_choice(serve, make_backend, eventually):
    backend = make_backend(max_model_len=100_000)
    async with serve(backend) as running:
        body = {"prompt": "hi", "stream": True, "max_tokens": 90_000}
        async with running.http.stream("POST", TEXT, json=body) as answer:
            async for line in answer.aiter_lines():
                assert line.startswith("data: ")
                break
        await eventually(lambda: not backend.running)
        assert len(backend.cancelled) == 1
        assert backend.generated < 90_000


@pytest.mark.parametrize("n", [1, 3])
async def test_an_engine_that_fails_is_a_503_and_shows_in_health(serve, make_backend, n):
    backend = make_backend()
    async with serve(backend) as running:
        backend.failure = EngineFailed("the inference engine failed: out of memory")
        answer = await running.http.post(TEXT, json={"prompt": "hi", "n": n})
        health = await running.http.get("/health")
    for response in (answer, health):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert "out of memory" in response.json()["error"]["message"]


async def test_an_engine_that_fails_in_mid_stream_ends_the_stream_with_an_error(serve, make_backend):
    backend = make_backend()
    async with serve(backend) as running:
        events = []
        async with running.http.stream(
            "POST", TEXT, json={"prompt": "hi", "stream": True, "max_tokens": 100}
        ) as answer:
            async for line in answer.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    backend.failure = EngineFailed("the inference engine failed")
    assert json.loads(events[-2])["error"]["code"] == 503
    assert events[-1] == "[DONE]"


async def test_what_nobody_expected_is_a_500_and_the_server_lives_on(serve, make_backend, caplog):
    backend = make_backend()
    async with serve(backend) as running:
        backend.failure = RuntimeError("a bug")
        answer = await running.http.post(TEXT, json={"prompt": "hi"})
        streamed = await running.http.post(TEXT, json={"prompt": "hi", "stream": True})
        backend.failure = None
        assert (await running.http.post(TEXT, json={"prompt": "hi"})).status_code == 200
    assert answer.status_code == 500
    assert "a bug" in answer.json()["error"]["message"]
    assert '"code":500' in streamed.text
    assert "a bug" in caplog.text


async def test_many_streams_at_once_all_end(serve, make_backend):
    async with serve(make_backend()) as running:

        async def one(number):
            async with httpx.AsyncClient(base_url=running.url, timeout=30, verify=False) as client:
                body = {"token_ids": [number], "sampling_params": {"max_tokens": 20}, "stream": True}
                return (await client.post(GENERATE, json=body)).text.count("token_ids")

        assert await asyncio.gather(*(one(number) for number in range(64))) == [20] * 64
        assert running.backend.running == set()
