"""The test of tests/gpu/test_engine.py for two computations that part, where no GPU is needed."""

from pathlib import Path

import pytest
import torch

from prime_rl.inference.engine import build as building
from tests.gpu.partings import may_part
from tests.gpu.test_engine import asked, assert_same_draws, build, generate, model

__all__ = ["model"]

LOGITS = torch.tensor([0.5, 0.2, 1e-9, 0.2, 0.1], dtype=torch.float64).log()


def part(draw: float, *tokens: int, temperature: float = 1.0) -> bool:
    return may_part(LOGITS, draw=draw, temperature=temperature, tokens=(tokens[0], tokens[1]))


def test_neighbours_part_where_the_draw_is_at_their_boundary_and_nowhere_else() -> None:
    assert part(0.5, 0, 1)
    assert part(0.50005, 1, 0)
    assert part(0.49995, 0, 1)
    assert not part(0.5002, 0, 1)
    assert not part(0.4, 0, 1)
    assert not part(0.7, 0, 1)


def test_what_lies_between_two_tokens_may_have_no_probability_to_speak_of() -> None:
    assert part(0.7, 1, 3)
    assert part(0.7, 1, 2)
    assert not part(0.5, 0, 3)
    assert not part(0.7, 0, 3)


def test_tokens_of_equal_probability_may_part_at_their_boundary_only() -> None:
    assert not part(0.6, 1, 3)
    assert not part(0.95, 1, 3)


def test_the_boundary_is_that_at_the_rows_temperature() -> None:
    squares = torch.tensor([0.25, 0.04, 0.0, 0.04, 0.01])
    boundary = float(squares[0] / squares.sum())
    assert part(boundary, 0, 1, temperature=0.5)
    assert not part(0.5, 0, 1, temperature=0.5)


def test_greedy_rows_part_at_ties_of_the_likeliest_only() -> None:
    tied = torch.tensor([1.0, 3.0, 3.0005, 2.0, 2.0], dtype=torch.float64)
    assert may_part(tied, draw=0.9, temperature=0.0, tokens=(2, 1))
    assert not may_part(tied, draw=0.9, temperature=0.0, tokens=(3, 4))
    assert not may_part(tied, draw=0.9, temperature=0.0, tokens=(0, 2))


def test_the_c_kernels_and_pytorch_part_nowhere_else(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = asked(temperature=0.6)
    with_kernels = generate(build(model, device="cpu"), requests)
    monkeypatch.setattr(building, "load_kernels", lambda: None)
    without = generate(build(model, device="cpu"), requests)
    assert_same_draws(model, requests, with_kernels, without, partings=2)
    hotter = generate(build(model, device="cpu"), asked(temperature=0.7))
    with pytest.raises(AssertionError):
        assert_same_draws(model, requests, with_kernels, hotter, partings=len(requests))
