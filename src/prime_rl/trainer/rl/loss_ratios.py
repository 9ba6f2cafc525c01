"""Importance ratios of tokens and sequences, and the masks that are made of them.

The ratio of a token is r = pi / mu: its probability under the weights in training over that under those that sampled
it. Shape suffixes: N tokens in the loss, S sequences of the micro-batch.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Ratios above e^20 = 4.9e8 count as e^20. A policy cannot have moved that far since it sampled the token, so such a
ratio says that trainer and engine disagree; unbounded, it would overflow float32 in the square of a gradient norm."""


class MaskBounds(Protocol):
    """The keys of a loss that leave tokens and sequences out by their ratios."""

    token_mask_low: float | None
    token_mask_high: float | None
    geo_mask_low: float | None
    geo_mask_high: float | None
    sequence_mask_low: float | None
    sequence_mask_high: float | None


def clamped(log_ratio: Tensor) -> Tensor:
    """At most MAX_LOG_RATIO; there without gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def sequence_log_ratios(log_ratio_N: Tensor, in_stream_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S] log of the product of the ratios of each sequence's tokens in the stream; 0 for one without any."""
    return _sums(torch.where(in_stream_N, log_ratio_N, 0.0), sequence_N, num_sequences).to(log_ratio_N.dtype)


def geometric_log_ratios(log_ratio_N: Tensor, in_stream_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S] log of the geometric mean of the ratios of each sequence's tokens in the stream; 0 for one without any."""
    sums_S = _sums(torch.where(in_stream_N, log_ratio_N, 0.0), sequence_N, num_sequences)
    counts_S = _sums(in_stream_N.to(log_ratio_N.dtype), sequence_N, num_sequences)
    return (sums_S / counts_S.clamp(min=1)).to(log_ratio_N.dtype)


def ratio_masks(
    log_ratio_N: Tensor, in_stream_N: Tensor, sequence_N: Tensor, num_sequences: int, bounds: MaskBounds
) -> dict[str, Tensor]:
    """Tokens that are left out because of their own or their sequence's ratio, bool [N], by kind of mask.

        token_masked      r < token_mask_low or r > token_mask_high            (IcePop: 0.5 and 5)
        geo_masked        the same of the geometric mean of r over the sequence
        sequence_masked   min r < sequence_mask_low or max r > sequence_mask_high over the sequence

    Only tokens in the stream count for a sequence. A kind without bounds is not there. IcePop: Ling Team, "Every Step
    Evolves" (arXiv 2510.18855), the calibration M(k; alpha, beta) of its objective.
    """

    masks: dict[str, Tensor] = {}
    low, high = bounds.token_mask_low, bounds.token_mask_high
    if low is not None or high is not None:
        masks["token_masked"] = _outside(log_ratio_N, log_ratio_N, low, high)
    low, high = bounds.geo_mask_low, bounds.geo_mask_high
    if low is not None or high is not None:
        mean_N = geometric_log_ratios(log_ratio_N, in_stream_N, sequence_N, num_sequences)[sequence_N]
        masks["geo_masked"] = _outside(mean_N, mean_N, low, high)
    low, high = bounds.sequence_mask_low, bounds.sequence_mask_high
    if low is not None or high is not None:
        smallest_S = log_ratio_N.new_full((num_sequences,), torch.inf)
        smallest_S = smallest_S.scatter_reduce(0, sequence_N, log_ratio_N.masked_fill(~in_stream_N, torch.inf), "amin")
        largest_S = log_ratio_N.new_full((num_sequences,), -torch.inf)
        largest_S = largest_S.scatter_reduce(0, sequence_N, log_ratio_N.masked_fill(~in_stream_N, -torch.inf), "amax")
        masks["sequence_masked"] = _outside(smallest_S[sequence_N], largest_S[sequence_N], low, high)
    return {name: mask_N & in_stream_N for name, mask_N in masks.items()}


def _outside(smallest_N: Tensor, largest_N: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool [N]: exp(smallest) < low or exp(largest) > high."""
    outside_N = torch.zeros_like(smallest_N, dtype=torch.bool)
    if low is not None:
        outside_N = outside_N | (smallest_N.exp() < low)
    if high is not None:
        outside_N = outside_N | (largest_N.exp() > high)
    return outside_N


def _sums(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S] in float64, so that the order of additions, which a GPU does not fix, leaves no trace in float32."""
    return torch.zeros(num_sequences, dtype=torch.float64, device=values_N.device).index_add(
        0, sequence_N, values_N.double()
    )
