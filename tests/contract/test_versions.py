"""Every answer says which weights sampled its tokens, and a client can ask for new enough ones."""

import pytest

from prime_rl.transport.api import MIN_VERSION_HEADER

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3, "ignore_eos": True},
    "/inference/v1/generate": {"token_ids": [65, 66], "sampling_params": {"max_tokens": 3, "ignore_eos": True}},
    "/v1/generate": {"token_ids": [65, 66], "sampling_params": {"max_tokens": 3, "ignore_eos": True}},
}


@pytest.mark.parametrize("n", [1, 3])
async def test_the_counts_of_each_choice_add_up_to_its_tokens(api, n):
    fields = {"max_tokens": 9, "n": n, "ignore_eos": True}
    expected = [[[0, 9]]] * n
    assert (await api.generate([65], **fields))["versions"] == expected
    assert (await api.chat("hi", **fields))["versions"] == expected
    assert (await api.complete("hi", **fields))["versions"] == expected
    assert (await api.complete(["hi", "ho"], **fields))["versions"] == expected * 2


async def test_tokens_that_are_no_text_count_too(api, tokenizer):
    answer = await api.complete("<|smile|>", max_tokens=9, return_token_ids=True)
    assert answer["versions"] == [[[0, len(answer["choices"][0]["token_ids"])]]]


async def test_a_stop_string_ends_the_count(api):
    free = (await api.complete("hi", max_tokens=30, seed=4, ignore_eos=True))["choices"][0]["text"]
    answer = await api.complete("hi", max_tokens=30, seed=4, ignore_eos=True, stop=[free[10]], return_token_ids=True)
    assert answer["versions"] == [[[0, len(answer["choices"][0]["token_ids"])]]]


@pytest.mark.parametrize("route", BODIES)
async def test_streams_carry_none(api, route):
    answer = await api.http.post(route, json=BODIES[route] | {"stream": True})
    assert answer.status_code == 200
    assert "versions" not in answer.text


@pytest.mark.parametrize("route", BODIES)
async def test_a_server_with_older_weights_says_so_and_when_to_ask_again(api, publisher, route):
    async def ask(version: str):
        return await api.http.post(route, json=BODIES[route], headers={MIN_VERSION_HEADER: version})

    assert (await ask("0")).status_code == 200
    refused = await ask("5")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert "weights 0" in error["message"]
    await api.post("/update_weights", weight_dir=str(publisher.other(5)), version=5)
    assert (await ask("5")).json()["versions"] == [[[5, 3]]]
    assert (await ask("6")).status_code == 503
    for nonsense in ("", "x", "-1", "1.5", "9" * 40):
        answer = await ask(nonsense)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
