"""Each Triton kernel computes what PyTorch computes, rounded where the decoder rounds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prime_rl.inference.engine.sampler import draw, uniform

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPES = [(4, 2, 16), (16, 8, 128), (6, 2, 64), (3, 3, 24)]  # query heads, key heads, head size
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the norm; NaN where anything was left unwritten."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 1024])
def test_the_norm_adds_and_rounds_as_the_decoder_does(dtype: torch.dtype, hidden: int) -> None:
    from prime_rl.models.gpu_kernels import add_rms_norm

    x, added, weight = (
        random(7, hidden, dtype=dtype),
        random(7, hidden, dtype=dtype, seed=1),
        random(hidden, dtype=dtype),
    )
    summed = x + added
    out = torch.full_like(x, torch.nan)
    add_rms_norm(x, added, weight, 1e-6, out)
    assert torch.equal(x, summed)
    assert error(out, F.rms_norm(summed, (hidden,), weight, 1e-6)) < tolerance(dtype) / 4
    first = torch.full_like(x, torch.nan)
    add_rms_norm(x, None, weight, 1e-6, first)
    assert torch.equal(first, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_times_up(dtype: torch.dtype) -> None:
    from prime_rl.models.gpu_kernels import silu_mul

    wide = random(5, 2 * 1500, dtype=dtype)
    out = torch.full((5, 1500), torch.nan, dtype=dtype, device=DEVICE)
    silu_mul(wide, out)
    gate, up = wide.chunk(2, dim=-1)
    assert error(out, F.silu(gate) * up) < tolerance(dtype) / 4


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
def test_queries_are_rotated_and_keys_and_values_stored(
    heads: tuple[int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    from prime_rl.models.decoder import rotate
    from prime_rl.models.gpu_kernels import norm_rotate_store

    q_heads, kv_heads, dim = heads
    qkv = random(5, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    angles = random(40, dim // 2, seed=3).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([3, 0, 39, 7, 7], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([4, 17, 31, 0, 9], dtype=torch.int32, device=DEVICE)
    keys, values = torch.zeros(2, 4, kv_heads, 8, dim, dtype=dtype, device=DEVICE)

    q, k, v = qkv.view(5, -1, dim).split([q_heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = F.rms_norm(q, (dim,), q_norm, 1e-6), F.rms_norm(k, (dim,), k_norm, 1e-6)
    expected_q, expected_k = (rotate(x, cos[positions.long()], sin[positions.long()]) for x in (q, k))
    expected_v = v.clone()

    half = dim // 2
    norms = (q_norm, k_norm, 1e-6) if normed else None
    rotations = cos[:, :half].contiguous(), sin[:, :half].contiguous()
    norm_rotate_store(qkv, heads, norms, rotations, positions, places, keys, values)
    assert error(qkv.view(5, -1, dim)[:, :q_heads], expected_q) < tolerance(dtype)
    at = places.long()
    assert error(keys[at // 8, :, at % 8], expected_k) < tolerance(dtype)
    assert torch.equal(values[at // 8, :, at % 8], expected_v)
    assert int((keys != 0).any(-1).sum()) == 5 * kv_heads


def cache_of(
    contexts: list[int], kv_heads: int, dim: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random keys and values, and tables that hold scattered blocks; what no table names is NaN."""
    counts = [-(-context // block) for context in contexts]
    order = np.random.default_rng(0).permutation(sum(counts) + 3)
    keys = torch.full((len(order), kv_heads, block, dim), torch.nan, dtype=dtype, device=DEVICE)
    values = keys.clone()
    tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int32, device=DEVICE)
    first = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = torch.from_numpy(order[first : first + count]).to(DEVICE)
        tables[row, :count] = blocks.int()
        for cache, seed in ((keys, row), (values, 100 + row)):
            filled = torch.full((count * block, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
            filled[:context] = random(context, kv_heads, dim, dtype=dtype, seed=seed)
            cache[blocks] = filled.view(count, block, kv_heads, dim).transpose(1, 2)
        first += count
    return keys, values, tables


def attended(q: torch.Tensor, row: int, context: int, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor):
    """Causal attention in float64 of queries [L, H, D] that end at `context`, written out."""
    block = keys.shape[2]
    own = tables[row, : -(-context // block)].long()
    k, v = (x[own].transpose(1, 2).flatten(0, 1)[:context].double() for x in (keys, values))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("lhd,chd->hlc", q.double(), k) / q.shape[-1] ** 0.5
    seen = torch.arange(context, device=DEVICE)[None] <= torch.arange(context - len(q), context, device=DEVICE)[:, None]
    return torch.einsum("hlc,chd->lhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("num_splits", [1, 4, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
def test_decode_attention_reads_scattered_blocks(
    heads: tuple[int, int, int], dtype: torch.dtype, num_splits: int | None
) -> None:
    from prime_rl.models.gpu_attention import DecodeAttention
    from prime_rl.models.gpu_kernels import META_FIELDS

    q_heads, kv_heads, dim = heads
    contexts = [1, 16, 17, 130, 300]
    keys, values, tables = cache_of(contexts, kv_heads, dim, 16, dtype)
    qkv = random(5, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    meta = torch.zeros(5, META_FIELDS, dtype=torch.int32, device=DEVICE)
    meta[:, 0] = torch.arange(5)
    meta[:, 2] = torch.tensor(contexts) - 1
    out = torch.full((5, q_heads * dim), torch.nan, dtype=dtype, device=DEVICE)
    DecodeAttention(heads, DEVICE)(qkv, keys, values, tables, meta, out, num_splits=num_splits)
    q = qkv.view(5, -1, dim)[:, None, :q_heads]
    expected = torch.cat([attended(q[i], i, context, keys, values, tables) for i, context in enumerate(contexts)])
    assert error(out.view(5, q_heads, dim), expected) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
def test_prefill_attention_of_pieces_with_and_without_a_past(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    from prime_rl.models.gpu_attention import prefill_attention, queries_per_block

    q_heads, kv_heads, dim = heads
    contexts, lengths = [70, 33, 150, 1], [70, 1, 40, 1]
    keys, values, tables = cache_of(contexts, kv_heads, dim, 8, dtype)
    qkv = random(sum(lengths), (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    out = torch.full((sum(lengths), q_heads * dim), torch.nan, dtype=dtype, device=DEVICE)
    blocks, starts = [], np.cumsum([0, *lengths])
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        for first in range(0, length, queries_per_block(heads)):
            blocks.append([row, starts[row] + first, context - length + first, length - first])
    query_blocks = torch.tensor(np.array(blocks), dtype=torch.int32, device=DEVICE)
    prefill_attention(qkv, keys, values, tables, query_blocks, out, heads)
    q = qkv.view(len(qkv), -1, dim)[:, :q_heads]
    expected = [
        attended(q[starts[row] : starts[row + 1]], row, context, keys, values, tables)
        for row, context in enumerate(contexts)
    ]
    assert error(out.view(-1, q_heads, dim), torch.cat(expected)) < tolerance(dtype)


def sample(logits: torch.Tensor, draws: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from prime_rl.models.gpu_kernels import META_FIELDS
    from prime_rl.models.gpu_sampling import TokenSampler

    rows = len(logits)
    meta = torch.zeros(rows, META_FIELDS, dtype=torch.int32, device=DEVICE)
    meta[:, 0] = torch.arange(rows).flip(0)
    meta[:, 4], meta[:, 5] = draws.float().view(torch.int32), scales.float().view(torch.int32)
    out = torch.full((rows, 2), -1, dtype=torch.int32, device=DEVICE)
    last = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    TokenSampler(logits.shape[1], max_rows=rows, device=DEVICE)(logits, meta, last, out)
    assert torch.equal(last.flip(0), out[:, 0])
    return out[:, 0].long(), out[:, 1].view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 4096, 20_000])
def test_tokens_are_drawn_where_the_draw_falls_in_the_cumulative_distribution(dtype: torch.dtype, vocab: int) -> None:
    logits = 3 * random(64, vocab, dtype=dtype)
    seeds = np.arange(64, dtype=np.uint64)
    draws = torch.from_numpy(uniform(seeds, seeds)).to(DEVICE)
    draws[0], draws[1] = 0.0, 1 - 2**-23
    scales = torch.linspace(0.3, 3.0, 64, device=DEVICE)
    ids, logprobs = sample(logits, draws, scales)
    expected = (logits.float() * scales[:, None]).log_softmax(-1)
    assert (logprobs - expected.gather(-1, ids[:, None])[:, 0]).abs().max() < 1e-5
    cumulative = expected.double().exp().cumsum(-1)
    ends = cumulative.gather(-1, ids[:, None])[:, 0]
    starts = ends - expected.double().exp().gather(-1, ids[:, None])[:, 0]
    assert bool((starts - 1e-5 <= draws).all() and (draws <= ends + 1e-5).all())
    assert (ids == draw(expected, draws)).float().mean() > 0.95


def test_greedy_rows_take_the_first_of_the_likeliest_and_logits_that_are_not_finite_show() -> None:
    logits = random(4, 10_000)
    logits[0, 7_000] = logits[0, 9_000] = 50.0
    logits[2, 4_321] = torch.nan
    logits[3, 4_321] = torch.inf
    draws = torch.tensor([-1.0, 0.5, -1.0, 0.5], device=DEVICE)
    ids, logprobs = sample(logits, draws, torch.tensor([1.0, 3e38, 1.0, 1.0], device=DEVICE))
    assert ids[:2].tolist() == [7_000, int(logits[1].argmax())]
    assert float(logprobs[0]) == pytest.approx(float(logits[0].log_softmax(-1)[7_000]), abs=1e-6)
    assert float(logprobs[1]) == 0.0
    assert torch.isnan(logprobs[2:]).all()
