"""The slow path of sampling on a GPU is plain PyTorch: here it is held against the CPU's sampler."""

from typing import Any

import pytest
import torch

from prime_rl.inference.backend import SamplingParams
from prime_rl.inference.engine.gpu_edits import is_plain, redraw
from prime_rl.inference.engine.sampler import Sampler
from prime_rl.inference.engine.scheduler import Chunk, Sequence

ROWS: list[dict[str, Any]] = [{}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.6}, {"repetition_penalty": 1.5}]


def sequence(row: int, **params: Any) -> Sequence:
    return Sequence(
        request_id=str(row),
        tokens=[1, 2, 3],
        prompt_len=2,
        sampling=SamplingParams(**({"max_tokens": 8} | params)),
        stop_ids=frozenset(),
        seed=row,
        row=9 - row,
        in_flight=1,
    )


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"temperature": 0.3}, True),
        ({"temperature": 0.0, "top_k": 5}, True),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"num_top_logprobs": 1}, False),
        ({"min_tokens": 2}, False),
        ({"presence_penalty": 0.1}, False),
    ],
)
def test_a_temperature_is_all_that_a_plain_row_asks_for(params: dict[str, Any], plain: bool) -> None:
    assert is_plain(sequence(0, **params)) is plain


def test_rows_that_ask_for_more_are_drawn_again_and_no_others() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 2
    sequences = [sequence(row, **params) for row, params in enumerate(ROWS)]
    out, last = torch.full((5, 2), -7, dtype=torch.int32), torch.full((10,), -7, dtype=torch.int32)
    assert redraw([Chunk(s, 2, 1) for s in sequences], logits, last, out, 0) == []
    expected = Sampler(torch.device("cpu")).sample(logits.clone(), sequences)
    for row in (1, 3, 4):
        assert int(out[row, 0]) == int(last[9 - row]) == expected.token_ids[row]
        assert float(out[row, 1].view(torch.float32)) == pytest.approx(expected.logprobs[row], abs=1e-6)
    for row in (0, 2):
        assert out[row].tolist() == [-7, -7]
        assert int(last[9 - row]) == -7


def test_what_cannot_be_drawn_is_marked_by_whose_fault_it_is() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = torch.nan
    sequences = [sequence(0, temperature=1e-40, top_k=3), sequence(1, top_k=3)]
    logits[0, 3] = 5.0
    out, last = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    redraw([Chunk(s, 2, 1) for s in sequences], logits, last, out, 0)
    logprobs = out[:, 1].view(torch.float32)
    assert (bool(torch.isinf(logprobs[0])), bool(torch.isnan(logprobs[1]))) == (True, True)
