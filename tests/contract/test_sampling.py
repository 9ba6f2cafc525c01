"""Draws: from the right distribution, repeatable by seed, and within the bounds that a request sets."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from tests.contract.model import END
from tests.contract.oracle import Sampling

PROMPT = list(range(40, 60))


def drawn(answer) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(min_p=0.05)],
    ids=["plain", "top-p", "min-p"],
)
async def test_tokens_are_drawn_as_often_as_they_are_likely(api, truth, sampling):
    requests = [api.generate(PROMPT, n=50, max_tokens=1, seed=100 * i, **sampling.fields) for i in range(20)]
    answers = await asyncio.gather(*requests)
    counts = Counter(tokens[0] for answer in answers for tokens in drawn(answer))
    expected = 1000 * np.exp(truth.distributions(PROMPT, [0], sampling)[0])
    assert all(expected[token] > 0 for token in counts)
    common = list(np.flatnonzero(expected >= 8))
    observed = np.array([counts[token] for token in common] + [1000 - sum(counts[token] for token in common)])
    wanted = np.array([*expected[common], 1000 - expected[common].sum()])
    kept = wanted > 1
    chi_square = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Five standard deviations: the seeds are fixed, so that it holds always or never.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, (observed, wanted)


@pytest.mark.parametrize("route", ["/v1/completions", "/inference/v1/generate", "/v1/chat/completions"])
async def test_a_seed_repeats_an_answer_and_another_does_not(api, route):
    async def sample(seed: int) -> list[list[int]]:
        sampling = {"seed": seed, "max_tokens": 12, "n": 2, "ignore_eos": True}
        if route == "/inference/v1/generate":
            return drawn(await api.generate(PROMPT, **sampling))
        if route == "/v1/completions":
            return drawn(await api.complete(PROMPT, return_token_ids=True, **sampling))
        return drawn(await api.chat("hi", return_token_ids=True, **sampling))

    first, second = await sample(5)
    assert first != second
    assert await sample(5) == [first, second]
    assert (await sample(6))[0] != first
    assert await sample(-(2**63)) == await sample(-(2**63))


async def test_choice_i_of_a_seed_is_that_of_the_seed_plus_i(api):
    together = drawn(await api.generate(PROMPT, seed=40, n=3, max_tokens=8, ignore_eos=True))
    alone = [drawn(await api.generate(PROMPT, seed=40 + i, max_tokens=8, ignore_eos=True))[0] for i in range(3)]
    assert together == alone


async def test_a_seeds_answer_does_not_depend_on_who_else_is_served(api):
    async def sample(seed: int) -> list[int]:
        return drawn(await api.generate(PROMPT[: 5 + seed % 7], seed=seed, max_tokens=16, ignore_eos=True))[0]

    alone = [await sample(seed) for seed in range(8)]
    assert await asyncio.gather(*(sample(seed) for seed in range(8))) == alone


async def test_without_a_seed_answers_differ(api):
    answers = [drawn(await api.generate(PROMPT, max_tokens=12, ignore_eos=True))[0] for _ in range(3)]
    assert answers[0] != answers[1] != answers[2]


@pytest.mark.parametrize("route", ["/v1/completions", "/inference/v1/generate"])
async def test_nothing_ends_an_answer_before_its_minimum(api, tokenizer, route):
    stops = list(range(0, 60))  # about half of what it writes
    sampling = {"max_tokens": 30, "min_tokens": 20, "n": 8, "seed": 2, "stop_token_ids": stops, "temperature": 1.5}
    if route == "/v1/completions":
        answer = await api.complete(PROMPT, return_token_ids=True, **sampling)
    else:
        answer = await api.generate(PROMPT, **sampling)
    banned = {*stops, tokenizer.convert_tokens_to_ids(END)}
    for tokens in drawn(answer):
        assert len(tokens) >= 20
        assert not banned & set(tokens[:20])
    assert any(len(tokens) < 30 for tokens in drawn(answer))


async def test_a_stop_string_before_the_minimum_is_no_stop(api):
    sampling = {"max_tokens": 30, "seed": 4, "ignore_eos": True}
    free = (await api.complete("hi", **sampling))["choices"][0]["text"]
    (choice,) = (await api.complete("hi", min_tokens=20, stop=[free[3], free[25]], **sampling))["choices"]
    ends = [free.index(stop, 20) for stop in {free[3], free[25]} if stop in free[20:]]
    assert len(choice["text"]) == min(ends)


async def test_temperatures_almost_zero_are_greedy(api, truth):
    prompt = list(range(36, 56))
    greedy = drawn(await api.generate(prompt, temperature=0, max_tokens=10))
    best, second = np.sort(truth.distributions(prompt, greedy[0], Sampling()))[:, :-3:-1].T
    assert (best - second).min() > 0.25, "vLLM raises temperatures below 0.01 to it: the next must be out of reach"
    assert drawn(await api.generate(prompt, temperature=1e-6, max_tokens=10)) == greedy
    assert drawn(await api.generate(prompt, top_k=1, max_tokens=10)) == greedy


async def test_a_repetition_is_penalised_in_the_prompt_too(api, truth):
    prompt = [40, 41] * 20
    tokens = drawn(await api.generate(prompt, temperature=0, max_tokens=8, repetition_penalty=5, ignore_eos=True))[0]
    rows = truth.distributions(prompt, tokens, Sampling(temperature=0, repetition_penalty=5))
    assert tokens == [int(row.argmax()) for row in rows]
    assert len({*tokens, 40, 41}) == len(tokens) + 2, "nothing comes twice under so high a penalty"
