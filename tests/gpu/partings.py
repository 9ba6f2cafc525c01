"""Where two computations of the same requests may part: only where a draw is within float noise of a boundary.

A draw u takes the first token whose cumulative probability exceeds u. Two computations whose distributions differ by
noise take different tokens, `low` before `high`, only if u is near both the end of `low` and the beginning of `high`.
"""

import torch
from torch import Tensor

DRAW_NOISE = 1e-4
"""Of a cumulative probability, between computations in float32; by chance a draw is as near in 1 of 5,000 cases."""
LOGIT_NOISE = 1e-3
"""Of a logit, likewise: greedy rows may take either of two that are nearer than that."""


def may_part(logits_V: Tensor, *, draw: float, temperature: float, tokens: tuple[int, int]) -> bool:
    """Whether one computation may take the one and another the other of two `tokens`, where `logits_V` is the truth.

    `logits_V`: float64, before the temperature. `draw`: the row's number in [0, 1) at this place.
    """
    assert logits_V.dtype == torch.float64
    low, high = sorted(tokens)
    assert low < high
    if temperature == 0.0:
        return bool(logits_V[[low, high]].min() >= logits_V.max() - LOGIT_NOISE)
    ends_V = (logits_V / temperature).softmax(-1).cumsum(-1)
    return bool(ends_V[high - 1] - DRAW_NOISE <= draw <= ends_V[low] + DRAW_NOISE)
