"""The clients that people have: stock `openai`, `renderers` (token ids in and out), and verifiers through both."""

import asyncio

import httpx
import openai
import pytest
import verifiers.legacy as vf
from datasets import Dataset
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import OverlongPromptError, generate
from renderers.configs import Qwen3RendererConfig
from verifiers.legacy.types import ClientConfig

from tests.contract.conftest import KEY
from tests.contract.model import ARGUMENTS
from tests.contract.servers import TOLERANCE
from tests.contract.test_tools import QUESTION, WEATHER

HI = [{"role": "user", "content": "hi"}]


async def test_the_stock_client_raises_its_own_errors(client, api, server):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=api.model, messages=HI, temperature=-1)
    assert (refused.value.status_code, refused.value.body["code"]) == (400, 400)
    assert "temperature" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="another", prompt="hi")
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


@pytest.fixture
def renderer(tokenizer):
    return create_renderer(tokenizer, Qwen3RendererConfig())


async def test_the_renderers_client_sends_and_gets_tokens(client, api, renderer, truth):
    sampling = {"max_tokens": 12, "seed": 3}
    answer = await generate(
        client=client, renderer=renderer, messages=HI, model=api.model, sampling_params=sampling, cache_salt="7"
    )
    chat = await api.chat("hi", return_token_ids=True, **sampling)
    assert answer["prompt_ids"] == chat["prompt_token_ids"]
    assert answer["completion_ids"] == chat["choices"][0]["token_ids"]
    assert answer["content"] == chat["choices"][0]["message"]["content"].strip()
    assert answer["finish_reason"] == chat["choices"][0]["finish_reason"]
    expected = truth.logprobs(answer["prompt_ids"], answer["completion_ids"])
    assert answer["completion_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


async def test_the_renderers_client_finds_the_tool_call(client, api, renderer):
    answer = await generate(
        client=client,
        renderer=renderer,
        messages=QUESTION,
        model=api.model,
        tools=[WEATHER],
        sampling_params={"max_tokens": 30},
    )
    (call,) = answer["tool_calls"]
    assert (call.name, answer["finish_reason"]) == ("get_weather", "tool_calls")
    assert str(call.arguments).replace("'", '"') == ARGUMENTS


async def test_the_renderers_client_knows_how_long_a_prompt_may_be(client, api, renderer):
    with pytest.raises(OverlongPromptError):
        await generate(
            client=client, renderer=renderer, messages=HI, model=api.model, prompt_ids=[65] * 1025, sampling_params={}
        )


def environment() -> vf.SingleTurnEnv:
    """Rewards how long an answer is."""

    def length(completion, **_) -> float:
        return float(len(completion[-1]["content"]))

    rows = [{"question": question, "answer": ""} for question in ("hi", "ho", "x" * 2000)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[length]))


def verifiers_client(kind: str, server, renderer, monkeypatch) -> vf.Client:
    monkeypatch.setenv("CONTRACT_KEY", KEY)
    config = ClientConfig(client_type=kind, api_base_url=f"{server.url}/v1", api_key_var="CONTRACT_KEY", max_retries=0)
    if kind == "renderer":
        return vf.RendererClient(config, renderer=renderer)
    return vf.OpenAIChatCompletionsClient(config)


@pytest.mark.parametrize("kind_of_client", ["openai_chat_completions", "renderer"])
async def test_verifiers_rolls_out(api, server, renderer, truth, monkeypatch, kind_of_client):
    client = verifiers_client(kind_of_client, server, renderer, monkeypatch)
    env = environment()
    sampling = {"max_tokens": 8, "seed": 1}
    if kind_of_client == "openai_chat_completions":
        sampling |= {"logprobs": True, "extra_body": {"return_token_ids": True}}
    try:
        rows = env.get_dataset()
        for row in list(rows)[:2]:
            state = await env.rollout(dict(row), client, api.model, sampling)
            await env.rubric.score_rollout(state)
            assert state.get("error") is None
            (step,) = state["trajectory"]
            tokens = step["tokens"]
            assert 1 <= len(tokens["completion_ids"]) <= 8
            assert state["reward"] == len(state["completion"][-1]["content"])
            expected = truth.logprobs(tokens["prompt_ids"], tokens["completion_ids"])
            assert list(tokens["completion_logprobs"]) == pytest.approx(expected, abs=TOLERANCE)
        state = await env.rollout(dict(rows[2]), client, api.model, sampling)
        assert state["prompt_too_long"], "a prompt that does not fit is known as one"
    finally:
        await client.close()


async def test_many_connections_at_once_are_served(api):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api.server.url, headers=api.server.headers, limits=limits) as http:
        body = {"token_ids": [65], "sampling_params": {"max_tokens": 2}}
        answers = await asyncio.gather(
            *(http.post("/inference/v1/generate", json=body, timeout=120) for _ in range(200))
        )
    assert {answer.status_code for answer in answers} == {200}
