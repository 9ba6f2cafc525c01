"""A client that goes away gives back what its request held."""

import asyncio

import httpx
import pytest

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/inference/v1/generate": {"token_ids": [65] * 100},
}


def body_of(route: str, **fields):
    limits = {"max_tokens": 900, "ignore_eos": True, "n": 4}
    if route == "/inference/v1/generate":
        return ROUTES[route] | {"sampling_params": limits} | fields
    return ROUTES[route] | limits | fields


async def assert_freed(api, counted: float) -> None:
    await api.await_metric("vllm:num_requests_running", lambda value: value == 0)
    await api.await_metric("vllm:num_requests_waiting", lambda value: value == 0)
    assert await api.metric("vllm:kv_cache_usage_perc") < 0.01
    await asyncio.sleep(0.2)
    after = await api.metric("vllm:generation_tokens_total")
    assert after < counted + 4 * 900, "it was not sampled to its end"
    await asyncio.sleep(0.2)
    assert await api.metric("vllm:generation_tokens_total") == after


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_is_closed_is_freed(api, route):
    counted = await api.metric("vllm:generation_tokens_total")
    async with api.http.stream("POST", route, json=body_of(route, stream=True)) as answer:
        async for _ in answer.aiter_lines():
            break
    await assert_freed(api, counted)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_whose_client_gives_up_is_freed(api, route):
    counted = await api.metric("vllm:generation_tokens_total")
    request = asyncio.create_task(api.http.post(route, json=body_of(route)))
    await api.await_metric("vllm:generation_tokens_total", lambda count: count > counted)
    request.cancel()
    await asyncio.wait({request})
    await assert_freed(api, counted)


async def test_a_request_that_is_given_up_while_it_waits_is_freed(api, publisher):
    counted = await api.metric("vllm:generation_tokens_total")
    await api.post("/pause")
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post("/v1/completions", json=body_of("/v1/completions"), timeout=0.3)
    await api.post("/resume")
    await assert_freed(api, counted)


async def test_others_are_served_on(api):
    kept = [asyncio.create_task(api.generate([seed], max_tokens=200, ignore_eos=True)) for seed in range(6)]
    for _ in range(6):
        async with api.http.stream("POST", "/v1/completions", json=body_of("/v1/completions", stream=True)) as answer:
            async for _ in answer.aiter_lines():
                break
    for answer in await asyncio.gather(*kept):
        assert len(answer["choices"][0]["token_ids"]) == 200
