"""Causal attention of many sequences in one row of tokens, behind one call.

`PackedAttention` is for training: whole sequences, differentiable, by the kernels of `packed_kernels`.
`PagedAttention` is for the engine on a CPU: it writes keys and values to a block cache and attends to what lies there
(on a GPU: `gpu_attention`). Both take the rotated queries and keys of all tokens of a step and return the mixed values.

Shape suffixes: T tokens of the row, S sequences, L padded query length, C padded context length, H query heads,
K key/value heads, D head size, N blocks, B positions of a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.models.packed_kernels import Kernel, Part, Rectangle, parts_of, uploaded

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


def group_step(lengths: Sequence[int], contexts: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in groups whose number of queries and whose context are both similar.

    Decodes stay apart from prefills, however long their context: a group's mask is as large as its padded queries times
    its padded context.
    Example: group_step([1, 1, 64], [60, 61, 64]) == [[2], [1, 0]]
    """
    return [
        [alike[i] for i in members]
        for alike in group_by_length(lengths)
        for members in group_by_length([contexts[i] for i in alike])
    ]


class PackedAttention:
    """Attention within sequences that lie end to end in one row; no token sees another sequence.

    With `Kernel.SDPA` sequences of similar length are padded to a rectangle and attend in one call, so that memory
    stays linear in T and many short sequences cost few calls. The other kernels need a GPU and move no token.
    """

    def __init__(
        self, seq_lens: Sequence[int], device: torch.device | str = "cpu", kernel: Kernel = Kernel.SDPA
    ) -> None:
        """`seq_lens`: lengths in the order of the row; they must sum to the T of each call."""
        assert all(length > 0 for length in seq_lens)
        self.seq_lens = tuple(seq_lens)
        self.num_tokens = sum(seq_lens)
        device = torch.device(device)
        self._attend: Callable[[Tensor, Tensor, Tensor], Tensor]
        if kernel is not Kernel.SDPA:
            self._attend = _InParts(parts_of(seq_lens, device, kernel))
        elif len(set(seq_lens)) == 1:
            self._attend = Rectangle(sequences=len(seq_lens), length=seq_lens[0], padded=seq_lens[0])
        else:
            self._attend = _InGroups(seq_lens, device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        assert q_THD.shape[0] == self.num_tokens, (q_THD.shape, self.num_tokens)
        return self._attend(q_THD, k_TKD, v_TKD)


class _InParts:
    """Neighbouring sequences together, in the order of the row."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._sizes = [part.num_tokens for part in parts]

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0](q_THD, k_TKD, v_TKD)
        pieces = zip(*(x.split(self._sizes) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        return torch.cat([part(*piece) for part, piece in zip(self._parts, pieces, strict=True)])


class _InGroups:
    """Sequences of similar length together, padded at the end, where causality hides it from every real token."""

    def __init__(self, seq_lens: Sequence[int], device: torch.device) -> None:
        lens = torch.tensor(list(seq_lens), dtype=torch.long)
        starts = torch.cumsum(lens, 0) - lens
        self._rectangles: list[Rectangle] = []
        self._gather: list[Tensor] = []  # per group, token of the row at each of its S * L places
        restore = torch.empty(int(lens.sum()), dtype=torch.long)  # place of each token among all groups' places
        offset = 0
        for members in group_by_length(seq_lens):
            group_lens, group_starts = lens[members, None], starts[members, None]
            width = int(group_lens.max())
            column = torch.arange(width)[None]
            tokens_SL = group_starts + torch.minimum(column, group_lens - 1)
            places_SL = offset + torch.arange(tokens_SL.numel()).view_as(tokens_SL)
            real_SL = column < group_lens
            restore[tokens_SL[real_SL]] = places_SL[real_SL]
            self._rectangles.append(Rectangle(sequences=len(members), length=width, padded=width))
            self._gather.append(uploaded(tokens_SL.flatten(), device))
            offset += tokens_SL.numel()
        self._restore = uploaded(restore, device)

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        # index_select: on a GPU the gradient of indexing sorts, that of index_select adds.
        outs = [
            rectangle(*(x.index_select(0, index) for x in (q_THD, k_TKD, v_TKD)))
            for index, rectangle in zip(self._gather, self._rectangles, strict=True)
        ]
        return torch.cat(outs).index_select(0, self._restore)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """Keys and values of all layers in blocks, on the CPU. Keys lie transposed: 16 positions make one vector."""

    keys: Tensor
    """[layers, N, K, D, B]"""
    values: Tensor
    """[layers, N, K, B, D]"""

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int], block_size: int, dtype: torch.dtype) -> "PagedCache":
        """A zeroed cache; `shape` is (layers, N, K, D). Memory is taken as it is used."""
        layers, num_blocks, kv_heads, head_dim = shape

        def zeros(*sizes: int) -> Tensor:
            # numpy's zeros come from the operating system untouched; torch's would be written, page by page.
            return torch.from_numpy(np.zeros(sizes, dtype=f"u{dtype.itemsize}")).view(dtype)

        return cls(
            keys=zeros(layers, num_blocks, kv_heads, head_dim, block_size),
            values=zeros(layers, num_blocks, kv_heads, block_size, head_dim),
        )

    @property
    def block_size(self) -> int:
        return self.keys.shape[-1]


IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """Which tokens of which sequences one engine step computes; all arrays int32.

    Example: two sequences decode, at positions 4 and 20, with blocks of 16: lengths [1, 1], contexts [5, 21],
    positions [4, 20], tables [[7, 0], [3, 9]].
    """

    lengths: IntArray
    """[S] tokens computed now; the row holds them end to end."""
    contexts: IntArray
    """[S] positions known after this step."""
    positions: IntArray
    """[T]"""
    tables: IntArray
    """[S, max blocks] block numbers; what lies behind a sequence's own is not read."""


class PagedAttention:
    """Attention of one engine step over a block cache: writes the step's keys and values, then attends to them all.

    Everything of a layer is written before any token attends, so sequences may share blocks written in the same step.
    """

    def __init__(self, cache: PagedCache, step: PagedStep) -> None:
        self.cache = cache
        size = cache.block_size
        owner_T = np.repeat(np.arange(len(step.lengths)), step.lengths)
        blocks_T = step.tables[owner_T, step.positions // size]
        self._blocks_T = torch.from_numpy(blocks_T.astype(np.int64))
        self._offsets_T = torch.from_numpy((step.positions % size).astype(np.int64))
        groups = group_step(step.lengths.tolist(), step.contexts.tolist())
        self._groups = [_PagedGroup(members, step, size) for members in groups]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._blocks_T, :, :, self._offsets_T] = k_TKD.to(keys.dtype)
        values[self._blocks_T, :, self._offsets_T] = v_TKD.to(values.dtype)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            group.attend(q_THD, keys, values, out_THD)
        return out_THD


class _PagedGroup:
    """Sequences of similar length and context, padded to [S, L] queries and [S, C] positions of context."""

    def __init__(self, members: list[int], step: PagedStep, block_size: int) -> None:
        lengths, contexts = step.lengths[members], step.contexts[members]
        starts = (np.cumsum(step.lengths) - step.lengths)[members]
        width, num_blocks = int(lengths.max()), -(-int(contexts.max()) // block_size)
        column = np.arange(width)
        real_SL = column[None] < lengths[:, None]
        tokens_SL = starts[:, None] + np.minimum(column[None], lengths[:, None] - 1)
        # The last query sees the whole context, each one before it a position less.
        last_seen_SL = step.positions[tokens_SL]
        mask_SLC = np.arange(num_blocks * block_size)[None, None] <= last_seen_SL[:, :, None]
        # Beyond its own blocks a table row holds stale numbers: read the first block there, hidden by the mask.
        own = np.arange(num_blocks)[None] < -(-contexts[:, None] // block_size)
        tables_SN = np.where(own, step.tables[members, :num_blocks], step.tables[members, :1])

        self._shape = tokens_SL.shape
        self._gather = torch.from_numpy(tokens_SL.astype(np.int64).reshape(-1))
        self._places = torch.from_numpy(np.flatnonzero(real_SL))
        self._tokens = torch.from_numpy(tokens_SL[real_SL].astype(np.int64))
        self._mask = torch.from_numpy(mask_SLC)[:, None]
        self._tables = torch.from_numpy(tables_SN.astype(np.int64))

    def attend(self, q_THD: Tensor, keys: Tensor, values: Tensor, out_THD: Tensor) -> None:
        """Write the outputs of this group's tokens to their places of `out_THD`."""
        q_SHLD = q_THD[self._gather].view(*self._shape, *q_THD.shape[1:]).transpose(1, 2)
        k_SKCD = keys[self._tables].permute(0, 2, 1, 4, 3).flatten(2, 3).to(q_THD.dtype)
        v_SKCD = values[self._tables].permute(0, 2, 1, 3, 4).flatten(2, 3).to(q_THD.dtype)
        out = F.scaled_dot_product_attention(
            q_SHLD, k_SKCD, v_SKCD, attn_mask=self._mask, enable_gqa=q_SHLD.shape[1] != k_SKCD.shape[1]
        )
        out_THD[self._tokens] = out.transpose(1, 2).flatten(0, 1)[self._places]
