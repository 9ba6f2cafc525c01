"""With `inference.deterministic` a request's tokens and logprobs are a function of the request alone, to the last bit.

Each case gives the same request another life: beside others, with its prompt cached, cut, preempted, in another slot.
Without the mode the numbers differ in their last bits, which the last test sees: what is compared here can differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.parity.test_engine import Limits, complete, complete_all, prompts_of, requests_of, running, save_model

from prime_rl.inference.backend import GenerationRequest, TokenOutput
from prime_rl.inference.engine import build
from prime_rl.inference.engine.engine import Engine

ALONE = Limits(deterministic=True)

CASES: dict[str, Limits] = {
    "beside seven others": ALONE,
    "prompts cut into pieces of nine tokens": replace(ALONE, max_num_batched_tokens=9, max_num_seqs=9),
    "two at a time": replace(ALONE, max_num_seqs=2),
    "few blocks, so that requests are preempted": replace(ALONE, num_blocks=16),
    "nothing shared": replace(ALONE, sharing=False),
    "blocks of another size": replace(ALONE, block_size=32),
    "keys and values in bfloat16": replace(ALONE, dtype="bfloat16", max_num_batched_tokens=21),
}

SAMPLING: dict[str, dict[str, object]] = {
    "plain": {},
    "hot": {"temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_p": 0.8, "top_k": 20},
    "penalised": {"repetition_penalty": 1.2},
    "with top logprobs": {"num_top_logprobs": 3},
    "with the prompt's logprobs": {"num_prompt_logprobs": 2},
}
"""A kind each: one that asks for more than a temperature must not change how the others are drawn."""


def eight() -> list[GenerationRequest]:
    """Requests of all kinds and lengths, two with the same prompt."""
    prompts = prompts_of([1, 5, 40, 17, 33, 3, 61])
    kinds = list(SAMPLING.values())
    requests = [requests_of([prompt], **kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)]
    requests.append(requests_of([prompts[2]])[0])
    return [replace(request, request_id=f"r{index}") for index, request in enumerate(requests)]


async def one_by_one(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[TokenOutput]]:
    return [await complete(engine, request) for request in requests]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path)


@pytest.mark.parametrize("case", CASES)
async def test_nothing_beside_a_request_changes_a_bit_of_it(case: str, model: Path) -> None:
    async with running(model, replace(ALONE, dtype=CASES[case].dtype, sharing=False)) as engine:
        alone = await one_by_one(engine, eight())
    async with running(model, CASES[case]) as engine:
        together = await complete_all(engine, eight())
        again = await complete_all(engine, list(reversed(eight())))
        stats = engine.stats()
    assert together == alone
    assert list(reversed(again)) == alone
    assert (stats.num_preemptions > 0) == (case == "few blocks, so that requests are preempted")
    assert (stats.prefix_hit_tokens_total > 0) == (case != "nothing shared")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
async def test_so_it_is_with_other_models(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name)
    async with running(model, ALONE) as engine:
        alone = await one_by_one(engine, eight())
        assert await complete_all(engine, eight()) == alone


async def test_so_it_is_where_torch_computes_instead_of_the_kernels(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    async with running(model, replace(ALONE, sharing=False)) as engine:
        alone = await one_by_one(engine, eight())
    async with running(model, replace(ALONE, max_num_batched_tokens=16)) as engine:
        assert await complete_all(engine, eight()) == alone


async def test_a_request_without_a_seed_draws_by_its_prompt_and_not_by_when_it_came(model: Path) -> None:
    prompt, other = prompts_of([12, 13])
    request = requests_of([prompt], seed=None)[0]
    second = replace(request, request_id="second", choice=1)
    async with running(model, ALONE) as engine:
        first = await complete(engine, request)
        await complete(engine, requests_of([other], seed=None)[0])
        assert await complete(engine, request) == first
        assert await complete(engine, second) != first


async def test_the_turns_of_a_rollout_draw_anew_though_they_ask_with_one_seed(model: Path) -> None:
    prompt = prompts_of([12])[0]
    turns = requests_of([prompt, [*prompt, 1]], seed=7, temperature=1.0)
    async with running(model, ALONE) as engine:
        seeds = {engine._seed_of(turn) for turn in turns}
    assert len(seeds) == 2


async def test_without_the_mode_the_last_bits_differ(model: Path) -> None:
    async with running(model) as engine:
        alone = await one_by_one(engine, eight())
        together = await complete_all(engine, eight())
    assert together != alone
