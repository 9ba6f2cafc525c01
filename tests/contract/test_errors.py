"""A request that cannot be served: always the OpenAI API's form, the field by its name, and nothing else disturbed."""

import json

import httpx
import pytest

from tests.contract.servers import MAX_MODEL_LEN

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
VALID = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    GENERATE: {"token_ids": [65, 66], "sampling_params": {"max_tokens": 2}},
}
OUT_OF_RANGE = {
    "temperature": [-0.5, 2.5, "hot", [], {}],
    "top_p": [0, 1.5, -1, "x"],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-0.1, 1.1, "x"],
    "repetition_penalty": [0, -1, "x"],
    "n": [0, -1, 10**6, "x", 1.5],
    "max_tokens": [-1, "x", 1.5],
    "min_tokens": [-1, 3, "x"],
    "seed": ["x", 0.5],
    "stop": [[""], 5, {"a": 1}],
    "stop_token_ids": [["x"], 5, [10**9]],
    "logprobs": [-7, 21, "x"],
    "frequency_penalty": [2.1, -2.1, "x"],
    "presence_penalty": [2.1, "x"],
    "logit_bias": [{"x": 1}, {"999999": 1}, 5],
}
VAGUE = [("logprobs", "x")]
"""vLLM 0.26 refuses them without naming the field."""
CASES = [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]


def assert_error(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """Assert that it is an error in the right form; its message."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"]
    if param is not None and error["param"] is not None:
        assert param in error["param"].split("."), error
    return error["message"]


def ids(case: tuple[str, object]) -> str:
    return f"{case[0]}={case[1]!s:.12}"


@pytest.mark.parametrize("route", [COMPLETIONS, GENERATE])
@pytest.mark.parametrize(("name", "value"), CASES, ids=map(ids, CASES))
async def test_a_value_out_of_its_range_is_refused(api, route, name, value):
    body = json.loads(json.dumps(VALID[route]))
    (body["sampling_params"] if route == GENERATE else body)[name] = value
    answer = await api.http.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    message = assert_error(answer, 400)
    if (name, value) not in VAGUE:
        assert name in message or name in (answer.json()["error"]["param"] or "")


@pytest.mark.parametrize("route", VALID)
async def test_a_prompt_that_leaves_no_room_says_how_long_it_may_be(api, route):
    long = {CHAT: [{"role": "user", "content": "x" * 1100}], COMPLETIONS: "x" * 1100, GENERATE: [65] * 1100}
    field = {CHAT: "messages", COMPLETIONS: "prompt", GENERATE: "token_ids"}
    answer = await api.http.post(route, json=VALID[route] | {field[route]: long[route]})
    message = assert_error(answer, 400)
    assert str(MAX_MODEL_LEN) in message


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_more_tokens_than_fit_are_refused(api, route):
    answer = await api.http.post(route, json=VALID[route] | {"max_tokens": MAX_MODEL_LEN})
    assert str(MAX_MODEL_LEN) in assert_error(answer, 400)


@pytest.mark.parametrize("token", [-1, 269, 10**9, 2**70, "a", 1.5, None], ids=str)
async def test_a_token_that_the_model_has_not_is_refused(api, token):
    assert_error(await api.http.post(GENERATE, json={"token_ids": [65, token], "sampling_params": {}}), 400)


@pytest.mark.parametrize("route", VALID)
async def test_an_empty_prompt_is_refused(api, route):
    empty = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": ""}, GENERATE: {"token_ids": []}}
    assert_error(await api.http.post(route, json=VALID[route] | empty[route]), 400)


@pytest.mark.parametrize("route", VALID)
async def test_a_prompt_that_is_missing_is_refused(api, route):
    body = {"max_tokens": 1, "sampling_params": {}, "model": api.model}
    assert_error(await api.http.post(route, json=body), 400)


@pytest.mark.parametrize(
    "message",
    [{}, {"role": 5, "content": "x"}, {"content": "x"}, {"role": "user", "content": 5}, "hi", None],
    ids=str,
)
async def test_a_message_that_is_none_is_refused(api, message):
    assert_error(await api.http.post(CHAT, json={"messages": [message], "max_tokens": 1}), 400)


@pytest.mark.parametrize("route", [*VALID, "/tokenize"])
async def test_another_model_is_not_here(api, route):
    body = VALID.get(route, {"prompt": "hi"}) | {"model": "another"}
    assert "another" in assert_error(await api.http.post(route, json=body), 404, "model")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{} {}", b"[" * 5000], ids=str)
@pytest.mark.parametrize("route", [*VALID, "/tokenize", "/update_weights"])
async def test_a_body_that_is_no_json_object_is_refused(api, route, content):
    assert_error(await api.http.post(route, content=content, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_options_of_a_stream_need_one(api, route):
    answer = await api.http.post(route, json=VALID[route] | {"stream_options": {"include_usage": True}})
    assert_error(answer, 400)


async def test_alternatives_need_logprobs(api):
    assert_error(await api.http.post(CHAT, json=VALID[CHAT] | {"top_logprobs": 2}), 400, "top_logprobs")


async def test_unknown_fields_are_ignored(api):
    for route, body in VALID.items():
        assert (await api.http.post(route, json=body | {"no_such_field": 1})).status_code == 200
    answer = await api.http.post(GENERATE, json={"token_ids": [65], "sampling_params": {"max_tokens": 1, "none": 1}})
    assert answer.status_code == 200


async def test_a_route_that_is_not_there_is_404(api):
    assert_error(await api.http.get("/v1/nothing"), 404)


@pytest.mark.parametrize("route", [*VALID, "/update_weights", "/pause"])
async def test_a_wrong_method_is_405(api, route):
    answer = await api.http.delete(route)
    assert_error(answer, 405)
    assert "POST" in answer.headers["allow"]
