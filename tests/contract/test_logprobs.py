"""Logprobs are those of the distribution that a token was drawn from, which is computed anew in float64."""

import math

import pytest

from tests.contract.oracle import Sampling
from tests.contract.servers import TOLERANCE

PROMPT = list(range(40, 60))
CASES = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "hot": Sampling(temperature=1.6),
    "top-p": Sampling(temperature=0.7, top_p=0.8),
    "top-k": Sampling(temperature=1.2, top_k=5),
    "min-p": Sampling(min_p=0.1),
    "min-p-then-top-p": Sampling(temperature=0.9, min_p=0.05, top_p=0.7),
    "top-k-then-top-p": Sampling(top_k=20, top_p=0.85),
    "repetition": Sampling(repetition_penalty=1.4),
    "reward-repetition": Sampling(temperature=0.8, repetition_penalty=0.7, top_p=0.95),
    "min-tokens": Sampling(min_tokens=24, temperature=1.3),
    "all": Sampling(temperature=0.7, top_p=0.9, top_k=30, min_p=0.02, repetition_penalty=1.2, min_tokens=10),
    "greedy": Sampling(temperature=0),
}


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
async def test_they_are_of_the_distribution_after_all_filters(api, truth, sampling):
    n = 1 if sampling.temperature == 0 else 4
    answer = await api.generate(PROMPT, **({"seed": 11, "n": n, "max_tokens": 24, "logprobs": 1} | sampling.fields))
    for choice in answer["choices"]:
        tokens = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert len(tokens) == len(logprobs) >= min(24, sampling.min_tokens)
        assert logprobs == pytest.approx(truth.logprobs(PROMPT, tokens, sampling), abs=TOLERANCE)


async def test_greedy_takes_the_most_likely_token_and_cares_for_no_filter(api, truth):
    plain = await api.generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True)
    filtered = await api.generate(PROMPT, temperature=0, top_p=0.1, top_k=2, min_p=0.5, max_tokens=20, ignore_eos=True)
    tokens = plain["choices"][0]["token_ids"]
    assert filtered["choices"][0]["token_ids"] == tokens
    rows = truth.distributions(PROMPT, tokens, Sampling(temperature=0))
    assert tokens == [int(row.argmax()) for row in rows]


async def test_alternatives_are_the_most_likely_tokens_of_the_same_distribution(api, truth, tokenizer):
    fields = {"seed": 3, "max_tokens": 12, "ignore_eos": True, "temperature": 0.8}
    answer = await api.complete(PROMPT, logprobs=4, return_tokens_as_token_ids=True, return_token_ids=True, **fields)
    (choice,) = answer["choices"]
    rows = truth.distributions(PROMPT, choice["token_ids"], Sampling(temperature=0.8))
    for row, token, tops in zip(rows, choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
        best = (-row).argsort()[:4].tolist()
        assert {f"token_id:{other}" for other in {*best, token}} == tops.keys()
        for name, logprob in tops.items():
            assert logprob == pytest.approx(float(row[int(name.removeprefix("token_id:"))]), abs=TOLERANCE)


async def test_chat_tells_tokens_as_text_with_their_bytes(api, truth, tokenizer):
    answer = await api.chat("hi", seed=3, max_tokens=12, logprobs=True, top_logprobs=3, return_token_ids=True)
    (choice,) = answer["choices"]
    rows = truth.distributions(answer["prompt_token_ids"], choice["token_ids"], Sampling())
    for row, token, entry in zip(rows, choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        tops = {tuple(other["bytes"]): other["logprob"] for other in entry["top_logprobs"]}
        assert len(tops) == 3
        for best in (-row).argsort()[:2]:  # vLLM counts the sampled token as one of the three, OpenAI does not
            assert tops[tuple(tokenizer.decode([best]).encode())] == pytest.approx(float(row[best]), abs=TOLERANCE)
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert text.removesuffix("<|im_end|>") == choice["message"]["content"]


def check_prompt_logprobs(found, truth, prompt, k):
    """Assert that they are those of the oracle."""
    assert len(found) == len(prompt)
    assert found[0] is None
    for token, entries, row in zip(prompt[1:], found[1:], truth.prompt_logprobs(prompt), strict=True):
        order = (-row).argsort().tolist()
        assert entries.keys() == {str(token), *map(str, order[:k])}
        for name, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(row[int(name)]), abs=TOLERANCE)
            assert entry["rank"] == order.index(int(name)) + 1


@pytest.mark.parametrize("k", [0, 3])
async def test_prompt_logprobs_are_those_of_the_model(api, truth, k):
    answer = await api.generate(PROMPT, max_tokens=1, prompt_logprobs=k)
    check_prompt_logprobs(answer["prompt_logprobs"], truth, PROMPT, k)
    answer = await api.complete(PROMPT, max_tokens=1, prompt_logprobs=k)
    check_prompt_logprobs(answer["choices"][0]["prompt_logprobs"], truth, PROMPT, k)
    answer = await api.chat("hello", max_tokens=1, prompt_logprobs=k, return_token_ids=True)
    check_prompt_logprobs(answer["prompt_logprobs"], truth, answer["prompt_token_ids"], k)


async def test_prompt_logprobs_do_not_depend_on_the_sampling_or_on_what_is_cached(api, truth):
    long = [(7 * i) % 90 for i in range(150)]
    await api.generate(long, max_tokens=1)
    answer = await api.generate(long, max_tokens=2, temperature=0.5, top_p=0.5, prompt_logprobs=1, n=2)
    check_prompt_logprobs(answer["prompt_logprobs"], truth, long, 1)


async def test_an_echo_has_the_logprobs_of_the_prompt(api, truth):
    answer = await api.complete(PROMPT, max_tokens=2, ignore_eos=True, echo=True, logprobs=0, seed=1)
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    rows = truth.prompt_logprobs(PROMPT)
    expected = [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]
    assert values[1 : len(PROMPT)] == pytest.approx(expected, abs=TOLERANCE)


async def test_what_cannot_be_drawn_is_not_minus_infinity_on_the_wire(api):
    answer = await api.complete("hi", max_tokens=4, top_k=2, logprobs=5, ignore_eos=True, seed=1)
    values = [v for tops in answer["choices"][0]["logprobs"]["top_logprobs"] for v in tops.values()]
    assert all(math.isfinite(value) for value in values)
