"""Five hundred malformed requests: no answer is a server error, refusals have the right form, and it serves on."""

import copy
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.contract.servers import Server

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2}
SAMPLING |= {"stop": ["x"], "stop_token_ids": [3], "min_tokens": 1, "logprobs": 1, "repetition_penalty": 1.1}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, **SAMPLING, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
            "prompt_logprobs": None,
        },
    ),
    ("/v1/completions", {"prompt": "hi", **SAMPLING, "echo": True, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], **SAMPLING, "stream": True, "logit_bias": {"5": 1.0}}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 2, "frequency_penalty": 0.5, "presence_penalty": 0.5}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {**SAMPLING, "prompt_logprobs": 1}}),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": 2}, "stream": True, "cache_salt": "s"},
    ),
    (
        "/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "bad_words": ["a"]}, "request_id": "r"},
    ),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": True}),
    ("/update_weights", {"weight_dir": "/no/such/directory", "version": 1}),
    ("/init_weight_transfer", {"host": "", "port": 1, "rank_offset": 1, "world_size": 2, "timeout": 0.1}),
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.text(st.characters(categories=["Cs", "Cc", "Co", "Mn"]), max_size=4),  # lone surrogates among them
    st.sampled_from(["", "\x00", "x" * 5000, "<|im_end|>", "<tool_call>", "{{ 7 }}", "../../etc", "1", "null"]),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


def _deep(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested


def _places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside of a body."""
    found = [path] if path else []
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        found += _places(value, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, body: Any) -> Any:
    """A valid body after one to three changes: other values, missing and new keys, values twice or far too deep."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(body) or [()]))
        if not path:
            return draw(JUNK)
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        change = draw(st.sampled_from(["junk", "junk", "junk", "remove", "wrap", "deep", "many", "new"]))
        if change == "junk":
            parent[path[-1]] = draw(JUNK)
        elif change == "remove":
            del parent[path[-1]]
        elif change == "wrap":
            parent[path[-1]] = [parent[path[-1]]]
        elif change == "deep":
            parent[path[-1]] = _deep(draw(st.sampled_from([50, 400])))
        elif change == "many":
            parent[path[-1]] = [parent[path[-1]]] * draw(st.sampled_from([2, 200]))
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = draw(JUNK)
    return body


@dataclass(frozen=True)
class Malformed:
    """A request as bytes."""

    method: str
    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...] = ()


def _broken(content: bytes) -> st.SearchStrategy[bytes]:
    """JSON that is none any more."""
    return st.one_of(
        st.integers(0, max(len(content) - 1, 0)).map(lambda end: content[:end]),
        st.binary(min_size=1, max_size=4).map(
            lambda noise: content[: len(content) // 2] + noise + content[len(content) // 2 :]
        ),
        st.just(content.decode().encode("utf-16")),
        st.just(b"[" * 20000),
        st.just(b'{"messages":' * 3000),
        st.binary(max_size=40),
        st.just(content + b"x" * 200_000),
    )


@st.composite
def malformed(draw: st.DrawFn) -> Malformed:
    path, valid = draw(st.sampled_from(VALID))
    kind = draw(st.sampled_from(["body", "body", "body", "body", "body", "bytes", "method", "headers", "path"]))
    headers = [("Content-Type", "application/json")]
    content = json.dumps(valid).encode()
    method = "POST"
    if kind == "body":
        content = json.dumps(draw(mutated(valid))).encode()
    elif kind == "bytes":
        content = draw(_broken(content))
    elif kind == "method":
        method = draw(st.sampled_from(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "NONSENSE"]))
    elif kind == "headers":
        junk = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip)
        names = ["Content-Type", "Content-Encoding", "Accept", "X-Prime-Min-Version", "X-Session-ID", "X-Request-Id"]
        headers += [(draw(st.sampled_from(names)), draw(junk)), ("X-Long", "y" * draw(st.sampled_from([1, 30000])))]
    else:
        path = draw(
            st.sampled_from([path + "/", path.upper(), path + "?x=%ff", "/", "/v1", "/v1/models/x", "//", "/%00"])
        )
    return Malformed(method, path, content, tuple(headers))


def assert_no_server_error(answer: httpx.Response, request: Malformed) -> None:
    """A refusal is the client's, in the OpenAI API's form, or passes by itself."""
    seen = f"{request!r:.3000}\n-> {answer.status_code} {answer.text[:1000]}"
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        assert "retry-after" in answer.headers, seen
    else:
        assert answer.status_code < 500, seen
    if answer.text == "Invalid HTTP request received.":
        return  # it is no HTTP, so that no application has seen it
    if answer.status_code >= 400 and request.method != "HEAD":
        error = answer.json()["error"]
        assert error["code"] == answer.status_code, seen
        assert isinstance(error["message"], str), seen
        assert error["message"], seen
        assert isinstance(error["type"], str), seen
    if "event-stream" in answer.headers.get("content-type", ""):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert all(json.loads(event).get("error", {}).get("code", 400) < 500 for event in events), seen


@pytest.fixture
def sync_http(server: Server):
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as http:
        yield http


@pytest.mark.timeout(600)
def test_malformed_requests_are_the_clients_errors(sync_http, server):
    @settings(
        max_examples=500,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=malformed())
    def send(request: Malformed) -> None:
        answer = sync_http.request(
            request.method, request.path, content=request.content, headers=[(k, v) for k, v in request.headers]
        )
        assert_no_server_error(answer, request)

    send()
    assert_serves(sync_http, server)


def assert_serves(http: httpx.Client, server: Server) -> None:
    health = http.get("/health").json()
    assert (health["status"], health["version"]) == ("ok", 0)
    body = {"model": str(server.model), "token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
    assert server.process.poll() is None


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize"])
def test_a_body_that_is_far_too_large_is_refused(sync_http, server, route):
    content = b'{"prompt": "' + b"x" * (65 << 20) + b'"}'
    answer = sync_http.post(route, content=content, headers={"Content-Type": "application/json"})
    assert_no_server_error(answer, Malformed("POST", route, b"..."))
    assert answer.status_code == 413
    assert_serves(sync_http, server)


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_nesting_of_any_depth_is_refused_or_served(sync_http, server, depth):
    for content in (
        b"[" * depth + b"]" * depth,
        b'{"prompt": "x", "max_tokens": 1, "a": ' + b"[" * depth + b"]" * depth + b"}",
    ):
        answer = sync_http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert_no_server_error(answer, Malformed("POST", f"depth {depth}", content[:40]))
    assert_serves(sync_http, server)
