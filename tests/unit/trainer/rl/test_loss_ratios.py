import math
from types import SimpleNamespace

import pytest
import torch

from prime_rl.trainer.rl.loss_ratios import clamped, geometric_log_ratios, ratio_masks, sequence_log_ratios

LOG_RATIOS = torch.tensor([2.0, 0.5, 9.0, 0.25, 4.0]).log()
IN_STREAM = torch.tensor([True, True, False, True, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


def masked(**bounds):
    keys = ("token_mask", "geo_mask", "sequence_mask")
    every = {f"{key}_{side}": None for key in keys for side in ("low", "high")}
    masks = ratio_masks(LOG_RATIOS, IN_STREAM, SEQUENCE, 3, SimpleNamespace(**{**every, **bounds}))
    return {name: mask.int().tolist() for name, mask in masks.items()}


def test_the_ratio_of_a_sequence_is_that_of_its_tokens_in_the_stream():
    assert sequence_log_ratios(LOG_RATIOS, IN_STREAM, SEQUENCE, 3).exp().tolist() == pytest.approx([1, 1, 1])
    odd = sequence_log_ratios(LOG_RATIOS, torch.ones(5, dtype=torch.bool), SEQUENCE, 3)
    assert odd.exp().tolist() == pytest.approx([9, 1, 1])


def test_a_geometric_mean_divides_by_the_tokens_in_the_stream_and_is_one_without_any():
    token_2_of_each = torch.tensor([False, True, False, False, True])
    means = geometric_log_ratios(LOG_RATIOS, token_2_of_each, SEQUENCE, 3)
    assert means.exp().tolist() == pytest.approx([0.5, 4, 1])
    assert means.dtype == torch.float32


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, {}),
        ({"token_mask_low": 0.5}, {"token_masked": [0, 0, 0, 1, 0]}),
        ({"token_mask_high": 2.5}, {"token_masked": [0, 0, 0, 0, 1]}),
        ({"token_mask_low": 0.6, "token_mask_high": 3.0}, {"token_masked": [0, 1, 0, 1, 1]}),
        ({"geo_mask_low": 0.9, "geo_mask_high": 1.1}, {"geo_masked": [0, 0, 0, 0, 0]}),
        ({"geo_mask_high": 0.9}, {"geo_masked": [1, 1, 0, 1, 1]}),
        ({"geo_mask_low": 1.1}, {"geo_masked": [1, 1, 0, 1, 1]}),
        ({"sequence_mask_low": 0.4}, {"sequence_masked": [0, 0, 0, 1, 1]}),
        ({"sequence_mask_high": 3.0}, {"sequence_masked": [0, 0, 0, 1, 1]}),
        ({"sequence_mask_high": 8.0}, {"sequence_masked": [0, 0, 0, 0, 0]}),  # 9 is in another stream
        (
            {"sequence_mask_low": 0.0, "token_mask_high": 3.9},
            {"token_masked": [0, 0, 0, 0, 1], "sequence_masked": [0, 0, 0, 0, 0]},
        ),
    ],
)
def test_masks_leave_out_what_is_outside_their_bounds_and_in_the_stream(bounds, expected):
    assert masked(**bounds) == expected


def test_a_ratio_is_bounded_where_no_policy_can_have_moved():
    log_ratio = torch.tensor([300.0, 1.0, -300.0], requires_grad=True)
    ratios = clamped(log_ratio).exp()
    ratios.sum().backward()
    assert ratios.tolist() == pytest.approx([math.exp(20), math.e, 0])
    assert log_ratio.grad.tolist() == pytest.approx([0, math.e, 0])


def test_sums_over_a_long_sequence_keep_the_precision_of_float32():
    count = 100_000
    values = torch.full((count,), 1e-3)
    total = sequence_log_ratios(values, torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64), 1)
    assert total.item() == pytest.approx(100, rel=1e-6)
