"""Pausing keeps every request, and lets none sample."""

import asyncio

import pytest


async def test_pausing_keeps_requests_and_samples_nothing(api, publisher):
    async def sample(seed: int):
        return await api.generate([1, 2, seed % 90], max_tokens=300, ignore_eos=True, seed=seed)

    counted = await api.metric("vllm:generation_tokens_total")
    running = [asyncio.create_task(sample(seed)) for seed in range(8)]
    await api.await_metric("vllm:generation_tokens_total", lambda count: count > counted + 50)
    assert await api.post("/pause") == {"status": "paused"}
    assert await api.post("/pause?mode=keep") == {"status": "paused"}, "again is no harm"
    late = asyncio.create_task(sample(99))
    await asyncio.sleep(0.2)
    counted = await api.metric("vllm:generation_tokens_total")
    await asyncio.sleep(0.5)
    assert await api.metric("vllm:generation_tokens_total") == counted
    assert not late.done()
    health = await api.get("/health")
    assert (health["status"], health["paused"]) == ("ok", True)
    assert await api.post("/resume") == {"status": "resumed"}
    assert not (await api.get("/health"))["paused"]
    for answer in await asyncio.gather(*running, late):
        assert len(answer["choices"][0]["token_ids"]) == 300
        assert answer["versions"] == [[[0, 300]]]


async def test_an_update_leaves_a_paused_server_paused(api, publisher):
    await api.post("/pause")
    waiting = asyncio.create_task(api.generate([5], max_tokens=4, ignore_eos=True))
    await api.post("/update_weights", weight_dir=str(publisher.other(2)), version=2)
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert (await api.get("/health"))["paused"]
    await api.post("/resume")
    assert (await waiting)["versions"] == [[[2, 4]]]


@pytest.mark.parametrize("mode", ["abort", "wait", "x"])
async def test_requests_are_never_dropped_by_a_pause(api, mode):
    answer = await api.http.post(f"/pause?mode={mode}")
    assert answer.status_code == 400
    assert "keep" in answer.json()["error"]["message"]
    assert (await api.generate([5], max_tokens=2))["choices"][0]["token_ids"]


async def test_resuming_a_server_that_runs_is_no_harm(api):
    assert await api.post("/resume") == {"status": "resumed"}
