"""Causal attention of many sequences in one row of tokens, behind one call.

`PackedAttention` is for training: whole sequences, differentiable. `PagedAttention` is for the engine: it writes keys
and values to a block cache and attends to what lies there. Both take the rotated queries and keys of all tokens of a
step and return the mixed values.

Shape suffixes: T tokens of the row, S sequences of a group, L padded length of a group, H query heads,
K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# A sequence joins a group when it fills at least this share of the group's padded length.
MIN_FILL = 0.7


class Attention(Protocol):
    """What a decoder layer calls between its projections."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Mixed values [T, H, D]; `layer` counts from 0."""
        ...


def group_by_length(seq_lens: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in groups of similar length, so that padding each group wastes little.

    Example: group_by_length([8, 2, 7]) == [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(seq_lens)), key=lambda i: -seq_lens[i]):
        if not groups or seq_lens[index] < MIN_FILL * longest:
            groups.append([])
            longest = seq_lens[index]
        groups[-1].append(index)
    return groups


class PackedAttention:
    """Attention within sequences that lie end to end in one row; no token sees another sequence.

    Sequences of similar length are padded to a rectangle and attend in one call, so that memory stays linear in T and
    many short sequences cost few calls. Padding stands at the end, where causality hides it from every real token.
    """

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu") -> None:
        """`seq_lens`: lengths in the order of the row; they must sum to the T of each call."""
        assert all(length > 0 for length in seq_lens)
        lens = torch.tensor(list(seq_lens), dtype=torch.long)
        starts = torch.cumsum(lens, 0) - lens
        self.num_tokens = int(lens.sum())
        self._rectangle = len(set(seq_lens)) == 1
        self._shapes: list[tuple[int, int]] = []
        self._gather: list[Tensor] = []  # per group, token of the row at each of its S * L places
        restore = torch.empty(self.num_tokens, dtype=torch.long)  # place of each token among all groups' places
        offset = 0
        for members in group_by_length(seq_lens):
            group_lens, group_starts = lens[members, None], starts[members, None]
            width = int(group_lens.max())
            column = torch.arange(width)[None]
            tokens_SL = group_starts + torch.minimum(column, group_lens - 1)
            places_SL = offset + torch.arange(tokens_SL.numel()).view_as(tokens_SL)
            real_SL = column < group_lens
            restore[tokens_SL[real_SL]] = places_SL[real_SL]
            self._shapes.append((len(members), width))
            self._gather.append(tokens_SL.flatten().to(device))
            offset += tokens_SL.numel()
        self._restore = restore.to(device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        assert q_THD.shape[0] == self.num_tokens, (q_THD.shape, self.num_tokens)
        if self._rectangle:
            return _causal(q_THD, k_TKD, v_TKD, self._shapes[0])
        outs = [
            _causal(q_THD[index], k_TKD[index], v_TKD[index], shape)
            for index, shape in zip(self._gather, self._shapes, strict=True)
        ]
        return torch.cat(outs)[self._restore]


def _causal(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int]) -> Tensor:
    """Causal attention of S sequences of L tokens each, given and returned as [S * L, heads, D]."""
    q_SHLD, k_SKLD, v_SKLD = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_SHLD, k_SKLD, v_SKLD, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).reshape(q.shape)
