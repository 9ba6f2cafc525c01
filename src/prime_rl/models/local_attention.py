"""Causal attention with what the fast kernels lack: a window, a cap on the scores, a sink; for `impl = "hf"`.

Documents are attended to one after the other, in pieces of queries with the keys that they can see. Scores exist for
one piece at a time, and again in backward: memory is linear in the tokens of the row. Slower than a fused kernel.

Shape suffixes: T tokens of the row, H query heads, K key/value heads, G query heads a key/value head, D head size,
Q queries of a piece, C keys of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_PIECE: Final = 512
"""Queries at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How scores become weights, beyond a causal softmax."""

    scale: float
    """Of query times key."""
    window: int | None = None
    """Tokens that a token sees, itself included. None: all before it."""
    softcap: float | None = None
    """Scores become `cap * tanh(score / cap)` (Gemma 2, arXiv 2408.00118, section 2)."""


def attend_locally(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, seq_lens: Sequence[int], rule: ScoreRule, sinks_H: Tensor | None = None
) -> Tensor:
    """Mixed values [T, H, D]. `sinks_H`: a score of each head for attending to nothing (gpt-oss)."""
    outs, start = [], 0
    for length in seq_lens:
        for first in range(start, start + length, _PIECE):
            last = min(first + _PIECE, start + length)
            seen = start if rule.window is None else max(start, first - rule.window + 1)
            piece = (q_THD[first:last], k_TKD[seen:last], v_TKD[seen:last])
            outs.append(checkpoint(_piece, *piece, rule, sinks_H, use_reentrant=False))
        start += length
    return torch.cat(outs)


def _piece(q_QHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, rule: ScoreRule, sinks_H: Tensor | None) -> Tensor:
    """Queries that are the last of the keys' tokens."""
    num_queries, num_keys, kv_heads = q_QHD.shape[0], k_CKD.shape[0], k_CKD.shape[1]
    q_QKGD = q_QHD.unflatten(1, (kv_heads, -1))
    scores = torch.einsum("qkgd,ckd->kgqc", q_QKGD, k_CKD).float() * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    position_Q = torch.arange(num_keys - num_queries, num_keys, device=q_QHD.device)[:, None]
    position_C = torch.arange(num_keys, device=q_QHD.device)[None]
    hidden = position_C > position_Q
    if rule.window is not None:
        hidden |= position_C <= position_Q - rule.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].to(v_CKD.dtype)
    return torch.einsum("kgqc,ckd->qkgd", weights, v_CKD).flatten(1, 2)
