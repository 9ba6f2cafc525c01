"""Paged attention on a GPU, in Triton: one query a sequence while decoding, many while a prompt is computed.

Keys and values lie alike, [blocks, heads, positions, size], so that one head's part of a block is contiguous. A
decoding sequence's context is split among several programs where there are few sequences; a second kernel merges what
they found.

Shape suffixes as in `attention`: S sequences, H query heads, K key/value heads, D head size, N blocks, B positions of a
block.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: PLR0913, PLR0917 (a kernel is told of its memory and sizes one by one)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from prime_rl.models.gpu_kernels import META_FIELDS, power_of_2

LOG2_E = 1.4426950408889634
MIN_ROWS = 16
"""Fewest rows of a matrix product on tensor cores."""
MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4
DECODE_TILE = 64
"""Positions that are loaded at once. Tile and stages: within 2% of the fastest of 23 combinations on an H200; compiled
for it they take 38 KiB of shared memory (heads of 128 in bfloat16) to 77 (in float32)."""
DECODE_STAGES = 3
QUERY_BLOCK_FIELDS = 4
"""int32 fields of a block of queries: table row, its first token of the step, that token's position, queries left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCache:
    """Keys and values of all layers, each [layers, N, K, B, D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> "GpuCache":
        """A cache of (layers, N, K, B, D). Nothing reads what was not written before."""
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys=keys, values=values)

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]


@triton.jit
def _decode(
    qkv, keys, values, tables, meta, out, partial, partial_lse, scale,
    Q_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, MAX_BLOCKS: tl.constexpr, FIELDS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    table = tables + tl.load(meta + slot * FIELDS).to(tl.int64) * MAX_BLOCKS
    context = tl.load(meta + slot * FIELDS + 2) + 1
    span = tl.cdiv(tl.cdiv(context, SPLITS), TILE) * TILE
    start = split * span
    end = tl.minimum(start + span, context)

    g, d, n = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(qkv + slot * Q_STRIDE + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, end, TILE):
        position = first + n
        inside = position < end
        block = tl.load(table + position // BLOCK, mask=inside, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DIM
        k = tl.load(keys + at[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        keep = tl.exp2(highest - higher)
        total = total * keep + tl.sum(weight, 1)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        highest = higher
    if SPLITS == 1:
        tl.store(
            out + slot * OUT_STRIDE + head[:, None] * DIM + d[None, :],
            (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
    else:
        found = total > 0
        at_split = (slot * HEADS + head) * SPLITS + split
        tl.store(partial_lse + at_split, tl.where(found, highest + tl.log2(total), float("-inf")), mask=g < GROUP)
        safe = tl.where(found, total, 1.0)
        tl.store(partial + at_split[:, None] * DIM + d[None, :], mixed / safe[:, None], mask=mask)


@triton.jit
def _merge(
    partial, partial_lse, out, OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = (slot * HEADS + head) * SPLITS + s
    lse = tl.load(partial_lse + at)
    weight = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(partial + at[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + slot * OUT_STRIDE + head * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)


class DecodeAttention:
    """Attention of one query a sequence, the last of its context. Keys and values are already in the cache."""

    def __init__(self, heads: tuple[int, int, int], device: torch.device) -> None:
        """`heads`: (query heads, key heads, head size)."""
        self.heads = heads
        self._programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        # Sequences times splits, where there are several splits, are fewer than twice the programs by key heads.
        parts = max(2 * self._programs // heads[1], MAX_SPLITS)
        self._partial = torch.empty(parts * heads[0] * heads[2], dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(parts * heads[0], dtype=torch.float32, device=device)

    def num_splits(self, num_rows: int) -> int:
        """Programs that share a sequence's context, a power of two: enough for the whole GPU to have work."""
        splits = power_of_2(max(1, self._programs // (num_rows * self.heads[1])))
        return min(splits, MAX_SPLITS)

    def __call__(
        self, qkv_SX: Tensor, keys: Tensor, values: Tensor, tables: Tensor, meta_SF: Tensor, out_SX: Tensor,
        *, num_splits: int | None = None,
    ) -> None:  # fmt: skip
        """Write the mixed values [S, H * D]. `keys`, `values`: one layer of the cache, [N, K, B, D]."""
        q_heads, kv_heads, dim = self.heads
        splits = num_splits or self.num_splits(len(qkv_SX))
        group, width = q_heads // kv_heads, max(MIN_ROWS, power_of_2(dim))
        _decode[(len(qkv_SX), kv_heads, splits)](
            qkv_SX, keys, values, tables, meta_SF, out_SX, self._partial, self._partial_lse, LOG2_E / dim**0.5,
            Q_STRIDE=qkv_SX.stride(0), OUT_STRIDE=out_SX.stride(0), MAX_BLOCKS=tables.shape[1], FIELDS=META_FIELDS,
            HEADS=q_heads, KV_HEADS=kv_heads, GROUP=group, ROWS=max(MIN_ROWS, power_of_2(group)), DIM=dim,
            WIDTH=width, BLOCK=keys.shape[2], TILE=DECODE_TILE, SPLITS=splits, num_warps=2,
            num_stages=DECODE_STAGES,
        )  # fmt: skip
        if splits > 1:
            _merge[(len(qkv_SX), q_heads)](
                self._partial, self._partial_lse, out_SX, OUT_STRIDE=out_SX.stride(0), HEADS=q_heads, DIM=dim,
                WIDTH=width, SPLITS=splits, num_warps=1,
            )  # fmt: skip


@triton.jit
def _prefill(
    qkv, keys, values, tables, query_blocks, out, scale,
    Q_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, MAX_BLOCKS: tl.constexpr, FIELDS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    queries = query_blocks + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    table = tables + tl.load(queries).to(tl.int64) * MAX_BLOCKS
    first_token = tl.load(queries + 1)
    first_position = tl.load(queries + 2)
    count = tl.minimum(tl.load(queries + 3), QUERIES)

    r, d, n = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    query, head = r // GROUP, kv_head * GROUP + r % GROUP
    mask = (query < count)[:, None] & (d < DIM)[None, :]
    token = (first_token + query).to(tl.int64)
    q = tl.load(qkv + token[:, None] * Q_STRIDE + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    end = first_position + count
    for first in range(0, end, TILE):
        position = first + n
        inside = position < end
        block = tl.load(table + position // BLOCK, mask=inside, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DIM
        k = tl.load(keys + at[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(position[None, :] <= first_position + query[:, None], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        keep = tl.exp2(highest - higher)
        total = total * keep + tl.sum(weight, 1)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        highest = higher
    tl.store(
        out + token[:, None] * OUT_STRIDE + head[:, None] * DIM + d[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask,
    )  # fmt: skip


PREFILL_ROWS = 64


def queries_per_block(heads: tuple[int, int, int]) -> int:
    """How many queries of one sequence a block of the prefill kernel holds, each with all heads of its group."""
    group = heads[0] // heads[1]
    return max(PREFILL_ROWS, power_of_2(group)) // group


def prefill_attention(
    qkv_TX: Tensor, keys: Tensor, values: Tensor, tables: Tensor, query_blocks: Tensor, out_TX: Tensor,
    heads: tuple[int, int, int],
) -> None:  # fmt: skip
    """Causal attention of several queries a sequence over its whole context, which is already in the cache.

    `query_blocks`: int32 [number, QUERY_BLOCK_FIELDS], blocks of `queries_per_block` queries.
    """
    q_heads, kv_heads, dim = heads
    group = q_heads // kv_heads
    is_wide = keys.dtype == torch.float32
    _prefill[(len(query_blocks), kv_heads)](
        qkv_TX, keys, values, tables, query_blocks, out_TX, LOG2_E / dim**0.5,
        Q_STRIDE=qkv_TX.stride(0), OUT_STRIDE=out_TX.stride(0), MAX_BLOCKS=tables.shape[1], FIELDS=QUERY_BLOCK_FIELDS,
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(PREFILL_ROWS, power_of_2(group)), QUERIES=queries_per_block(heads),
        DIM=dim, WIDTH=max(MIN_ROWS, power_of_2(dim)), BLOCK=keys.shape[2], TILE=32 if is_wide else 64,
        num_warps=4, num_stages=2,
    )  # fmt: skip
