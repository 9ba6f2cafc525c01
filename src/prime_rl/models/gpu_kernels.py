"""What stands between the matrix products of a decoder on a GPU, in Triton. `gpu_decoder` calls it.

Every kernel computes in float32 and rounds where PyTorch's eager decoder rounds, so that the engine differs from the
trainer no more than two orders of the same sums do.

Sizes of the model are compile-time constants; the number of tokens is the grid alone, so no kernel is compiled twice.
Triton comes with PyTorch's CUDA builds; import this module only where there is a GPU.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: PLR0913, PLR0917 (a kernel is told of its memory and sizes one by one)

import triton
import triton.language as tl
from torch import Tensor

META_FIELDS = 8
"""int32 fields of a decoding row: table row, token (-1: the last one drawn), position, block, draw and inverse
temperature (bits of float32; a negative draw takes the most likely token); two are unused."""


def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`: Triton's blocks have such sizes."""
    return 1 << (size - 1).bit_length()


@triton.jit
def _start_decode(
    meta, last_tokens, tables, embedding, x, positions, places,
    MAX_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = tl.load(meta + slot * FIELDS).to(tl.int64)
    known = tl.load(meta + slot * FIELDS + 1)
    token = tl.where(known < 0, tl.load(last_tokens + row), known).to(tl.int64)
    position = tl.load(meta + slot * FIELDS + 2)
    block = tl.load(meta + slot * FIELDS + 3)
    tl.store(tables + row * MAX_BLOCKS + position // BLOCK, block)
    tl.store(positions + slot, position)
    tl.store(places + slot, block * BLOCK + position % BLOCK)
    h = tl.arange(0, WIDTH)
    tl.store(x + slot * HIDDEN + h, tl.load(embedding + token * HIDDEN + h, mask=h < HIDDEN), mask=h < HIDDEN)


def start_decode(
    meta_SF: Tensor, last_tokens: Tensor, tables: Tensor, embedding_VH: Tensor, x_SH: Tensor,
    positions_S: Tensor, places_S: Tensor, *, block_size: int,
) -> None:  # fmt: skip
    """Enter each row's newest block into its table; write the row's embedding, position and place in the cache."""
    hidden = x_SH.shape[1]
    _start_decode[(len(x_SH),)](
        meta_SF, last_tokens, tables, embedding_VH, x_SH, positions_S, places_S,
        MAX_BLOCKS=tables.shape[1], BLOCK=block_size, HIDDEN=hidden, WIDTH=power_of_2(hidden), FIELDS=META_FIELDS,
    )  # fmt: skip


@triton.jit
def _add_rms_norm(x, added, weight, out, eps, HAS_ADDED: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, WIDTH)
    mask = h < HIDDEN
    value = tl.load(x + token * HIDDEN + h, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + token * HIDDEN + h, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
        tl.store(x + token * HIDDEN + h, value.to(x.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    normed = value * scale * tl.load(weight + h, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + h, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x_TH: Tensor, added_TH: Tensor | None, weight_H: Tensor, eps: float, out_TH: Tensor) -> None:
    """Add to the residual stream in place, and write its normed value to `out_TH`."""
    hidden = x_TH.shape[1]
    _add_rms_norm[(len(x_TH),)](
        x_TH, x_TH if added_TH is None else added_TH, weight_H, out_TH, eps,
        HAS_ADDED=added_TH is not None, HIDDEN=hidden, WIDTH=power_of_2(hidden), num_warps=4,
    )  # fmt: skip


@triton.jit
def _norm_rotate_store(
    qkv, q_norm, k_norm, cos, sin, positions, places, keys, values, eps,
    NORMED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = token * (Q_HEADS + 2 * KV_HEADS) * DIM
    r = tl.arange(0, ROWS)[:, None]  # the query heads of this key head, then the key head itself
    h = tl.arange(0, HALF_WIDTH)[None, :]
    mask = (r <= GROUP) & (h < HALF)
    first_at = base + tl.where(r < GROUP, head * GROUP + r, Q_HEADS + head) * DIM + h
    first = tl.load(qkv + first_at, mask=mask, other=0.0)
    second = tl.load(qkv + first_at + HALF, mask=mask, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        in_half = h < HALF
        q_first, k_first = tl.load(q_norm + h, mask=in_half, other=0.0), tl.load(k_norm + h, mask=in_half, other=0.0)
        q_second = tl.load(q_norm + HALF + h, mask=in_half, other=0.0)
        k_second = tl.load(k_norm + HALF + h, mask=in_half, other=0.0)
        first = (first * scale * tl.where(r < GROUP, q_first, k_first).to(tl.float32)).to(dtype).to(tl.float32)
        second = (second * scale * tl.where(r < GROUP, q_second, k_second).to(tl.float32)).to(dtype).to(tl.float32)
    angle_at = tl.load(positions + token).to(tl.int64) * HALF + h
    c = tl.load(cos + angle_at, mask=h < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle_at, mask=h < HALF, other=0.0).to(tl.float32)
    turned_first = ((first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)).to(dtype)
    turned_second = ((second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)).to(dtype)
    is_query = mask & (r < GROUP)
    tl.store(qkv + first_at, turned_first, mask=is_query)
    tl.store(qkv + first_at + HALF, turned_second, mask=is_query)

    place = tl.load(places + token)
    cache_at = ((place // BLOCK).to(tl.int64) * KV_HEADS + head) * BLOCK * DIM + (place % BLOCK) * DIM
    is_key = mask & (r == GROUP)
    key_at = cache_at + h + r * 0
    tl.store(keys + key_at, turned_first.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + key_at + HALF, turned_second.to(keys.dtype.element_ty), mask=is_key)
    d = tl.arange(0, 2 * HALF_WIDTH)
    value = tl.load(qkv + base + (Q_HEADS + KV_HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
    tl.store(values + cache_at + d, value.to(values.dtype.element_ty), mask=d < DIM)


def norm_rotate_store(
    qkv_TX: Tensor, heads: tuple[int, int, int], norms: tuple[Tensor, Tensor, float] | None,
    rotations: tuple[Tensor, Tensor], positions_T: Tensor, places_T: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """Norm and rotate the queries in place; write normed, rotated keys and the values to their places of the cache.

    `heads`: (query heads, key heads, head size). `rotations`: cosine and sine [positions, D/2] in the model's dtype.
    """
    q_heads, kv_heads, dim = heads
    group, half = q_heads // kv_heads, dim // 2
    q_norm, k_norm, eps = norms if norms is not None else (qkv_TX, qkv_TX, 0.0)
    _norm_rotate_store[(len(qkv_TX), kv_heads)](
        qkv_TX, q_norm, k_norm, *rotations, positions_T, places_T, keys, values, eps,
        NORMED=norms is not None, Q_HEADS=q_heads, KV_HEADS=kv_heads, GROUP=group, ROWS=power_of_2(group + 1),
        DIM=dim, HALF=half, HALF_WIDTH=power_of_2(half), BLOCK=keys.shape[-2], num_warps=1,
    )  # fmt: skip


@triton.jit
def _silu_mul(wide, out, INNER: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = f < INNER
    gate = tl.load(wide + token * 2 * INNER + f, mask=mask, other=0.0)
    up = tl.load(wide + token * 2 * INNER + INNER + f, mask=mask, other=0.0).to(tl.float32)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * INNER + f, (silu * up).to(gate.dtype), mask=mask)


def silu_mul(wide_TF: Tensor, out_TF: Tensor) -> None:
    """silu(first half) * second half."""
    inner = out_TF.shape[1]
    width = min(power_of_2(inner), 1024)
    _silu_mul[(len(out_TF), triton.cdiv(inner, width))](wide_TF, out_TF, INNER=inner, WIDTH=width, num_warps=4)
