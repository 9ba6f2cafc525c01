import math
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl.inference.backend import SamplingParams
from prime_rl.inference.engine.sampler import Sampler, draw, uniform
from prime_rl.inference.engine.scheduler import Sequence
from prime_rl.models.native import Kernels, load_kernels

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def sequence(seed: int = 0, tokens: list[int] | None = None, stop: tuple[int, ...] = (), **params: Any) -> Sequence:
    return Sequence(
        request_id=str(seed),
        tokens=tokens or [0],
        prompt_len=1,
        sampling=SamplingParams(**({"max_tokens": 8} | params)),
        stop_ids=frozenset(stop),
        seed=seed,
    )


def frequencies(count: int = 4000, **params: Any) -> torch.Tensor:
    """Share of each token over many seeds."""
    sequences = [sequence(seed, **params) for seed in range(count)]
    sampled = Sampler(CPU).sample(LOGITS.repeat(count, 1), sequences)
    return torch.bincount(torch.tensor(sampled.token_ids), minlength=5) / count


def one(**params: Any) -> tuple[int, float]:
    sampled = Sampler(CPU).sample(LOGITS[None].clone(), [sequence(**params)])
    return sampled.token_ids[0], sampled.logprobs[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert (frequencies(temperature=temperature) - expected).abs().max() < 0.025


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.8}, [0, 1]),
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.95}, [0, 1, 2]),
        # min-p leaves 0, 1 and 2, of which 0 and 1 have 91%; of all tokens they have 87%.
        ({"min_p": 0.1, "top_p": 0.9}, [0, 1]),
    ],
)
def test_filters_exclude_tokens_and_logprobs_are_of_what_remains(params: dict[str, Any], allowed: list[int]) -> None:
    kept = torch.full_like(LOGITS, -torch.inf)
    kept[allowed] = LOGITS[allowed]
    assert (frequencies(**params) - kept.softmax(-1)).abs().max() < 0.025
    for seed in range(20):
        token, logprob = one(seed=seed, **params)
        assert logprob == pytest.approx(float(kept.log_softmax(-1)[token]), abs=1e-6)


def test_temperature_zero_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    for seed in range(20):
        token, logprob = one(seed=seed, temperature=0.0)
        assert token == 0
        assert logprob == pytest.approx(float(LOGITS.log_softmax(-1)[0]), abs=1e-6)


def test_the_repetition_penalty_lowers_tokens_of_prompt_and_completion() -> None:
    token, logprob = one(tokens=[0, 3], temperature=0.0, repetition_penalty=4.0)
    penalized = torch.tensor([0.5, 1.0, 0.0, -4.0, -3.0])
    assert token == 1
    assert logprob == pytest.approx(float(penalized.log_softmax(-1)[1]), abs=1e-6)


def test_stop_tokens_cannot_be_drawn_before_min_tokens() -> None:
    assert one(stop=(0,), temperature=0.0, min_tokens=2, tokens=[0])[0] == 1
    assert one(stop=(0,), temperature=0.0, min_tokens=2, tokens=[0, 1])[0] == 1
    assert one(stop=(0,), temperature=0.0, min_tokens=2, tokens=[0, 1, 1])[0] == 0
    assert one(stop=(0, 500), temperature=0.0, min_tokens=2, tokens=[0])[0] == 1


def test_a_row_is_drawn_by_its_seed_and_index_whatever_runs_beside_it() -> None:
    rows = [
        sequence(1),
        sequence(2, temperature=0.7),
        sequence(3, top_k=3),
        sequence(4, temperature=0.0),
        sequence(5, tokens=[0, 1, 2]),
        sequence(6, top_p=0.9, repetition_penalty=1.3),
    ]
    together = Sampler(CPU).sample(LOGITS.repeat(len(rows), 1), rows)
    for index, row in enumerate(rows):
        alone = Sampler(CPU).sample(LOGITS[None].clone(), [row])
        assert alone.token_ids == [together.token_ids[index]]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[index], abs=1e-6)


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["torch", "kernels"])
def test_row_by_row_nothing_beside_a_row_changes_a_bit_of_it(kernels: Kernels | None) -> None:
    rows = [
        sequence(1),
        sequence(2, temperature=0.7, num_top_logprobs=2),
        sequence(3, top_p=0.9),
        sequence(4, min_tokens=2, stop=tuple(range(300))),
        sequence(5),
    ]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    together = Sampler(CPU, kernels, row_by_row=True).sample(logits.clone(), rows)
    assert together.undrawn == {3}
    assert list(together.top_logprobs) == [1]
    for index in (0, 1, 2, 4):
        alone = Sampler(CPU, kernels).sample(logits[index : index + 1].clone(), [rows[index]])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[index], together.logprobs[index])
        assert alone.top_logprobs.get(0) == together.top_logprobs.get(index)


def test_a_sampler_notices_that_its_rows_have_changed() -> None:
    sampler = Sampler(CPU)
    cold, hot = sequence(temperature=0.0), sequence(seed=12, top_k=1, temperature=5.0)
    assert sampler.sample(LOGITS[None].clone(), [cold]).logprobs[0] < 0.0
    assert sampler.sample(LOGITS[None].clone(), [hot]).logprobs[0] == 0.0


def test_top_logprobs_come_most_likely_first_without_impossible_tokens() -> None:
    rows = [sequence(num_top_logprobs=3), sequence(), sequence(num_top_logprobs=4, top_k=2)]
    tops = Sampler(CPU).sample(LOGITS.repeat(3, 1), rows).top_logprobs
    assert sorted(tops) == [0, 2]
    assert [token for token, _ in tops[0]] == [0, 1, 2]
    assert [token for token, _ in tops[2]] == [0, 1]
    assert tops[0][1][1] == pytest.approx(float(LOGITS.log_softmax(-1)[1]), abs=1e-6)


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"repetition_penalty": 2.0}, {"min_tokens": 2, "stop": (1,)}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["torch", "kernels"])
def test_logits_that_are_not_finite_are_an_error(kernels: Kernels | None, bad: float, params: dict[str, Any]) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 3] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(CPU, kernels).sample(logits, [sequence(), sequence(**params)])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-40, "top_p": 0.5},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e-40, "temperature": 0.0},
        {"min_tokens": 2, "stop": tuple(range(5)), "num_top_logprobs": 2},
    ],
)
@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["torch", "kernels"])
def test_a_row_whose_own_parameters_leave_no_distribution_is_not_drawn_and_the_others_are(
    kernels: Kernels | None, params: dict[str, Any]
) -> None:
    rows = [sequence(1), sequence(2, **params), sequence(3)]
    sampled = Sampler(CPU, kernels).sample(LOGITS.repeat(3, 1), rows)
    assert sampled.undrawn == {1}
    alone = Sampler(CPU).sample(LOGITS.repeat(2, 1), [rows[0], rows[2]])
    assert [sampled.token_ids[row] for row in (0, 2)] == alone.token_ids
    assert [sampled.logprobs[row] for row in (0, 2)] == pytest.approx(alone.logprobs, abs=3e-6)
    assert alone.undrawn == frozenset()


def test_uniform_numbers_are_even_distinct_and_below_one() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), indices.ravel())
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert counts.min() > 0.94 * 4500
    assert counts.max() < 1.06 * 4500
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    grid = numbers.reshape(300, 300)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


def test_extreme_draws_land_on_possible_tokens() -> None:
    logprobs = torch.tensor([[-torch.inf, 0.3, 0.7, -torch.inf]]).log().nan_to_num(nan=-torch.inf)
    assert draw(logprobs, torch.tensor([0.0])).item() == 1
    assert draw(logprobs, torch.tensor([1 - 2**-23])).item() == 2


@pytest.mark.parametrize("vocab", [1, 5, 16, 64, 1000])
def test_the_kernel_draws_what_torch_draws(vocab: int, kernels: Kernels) -> None:
    rows = [sequence(seed, temperature=0.3 + seed % 5) for seed in range(200)]
    logits = 3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
    expected = Sampler(CPU).sample(logits.clone(), rows)
    actual = Sampler(CPU, kernels).sample(logits.clone(), rows)
    different = sum(a != b for a, b in zip(actual.token_ids, expected.token_ids, strict=True))
    assert different <= 1  # a draw may stand within float noise of a boundary
    if not different:
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=3e-6)
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(CPU, kernels).sample(logits.fill_(torch.nan), rows)
