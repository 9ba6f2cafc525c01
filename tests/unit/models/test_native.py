import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prime_rl.models import native
from prime_rl.models.attention import PagedAttention, PagedCache, PagedStep
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.fused import FusedDecoder
from prime_rl.models.hf import hf_tensors, load_hf_tensors
from prime_rl.models.native import Buffers, Kernels, NativeAttention, load_kernels


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("size", [8, 13, 256])
def test_add_rms_norm_equals_torch(rows: int, size: int, kernels: Kernels) -> None:
    x, delta, weight = random(rows, size), random(rows, size, seed=1), random(size, seed=2)
    out = torch.empty_like(x)
    total = x.clone()
    kernels.add_rms_norm(total, delta, weight, 1e-6, out)
    close(total, x + delta)
    close(out, F.rms_norm(x + delta, (size,), weight, 1e-6))
    kernels.add_rms_norm(total, None, weight, 1e-6, out)
    close(total, x + delta)


@pytest.mark.parametrize("rows", [1, 100])
def test_silu_mul_equals_torch_also_far_from_zero(rows: int, kernels: Kernels) -> None:
    x = random(rows, 96) * 30
    x[0, :8] = torch.tensor([0.0, -0.0, 100.0, -100.0, 88.0, -88.0, 1e-8, -1e-8])
    out = torch.empty(rows, 48)
    kernels.silu_mul(x, out)
    close(out, F.silu(x[:, :48]) * x[:, 48:])


@pytest.mark.parametrize("size", [(8, 3), (13, 16), (256, 100), (300, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_multiply_equals_torch_and_every_row_is_what_it_is_alone(
    size: tuple[int, int], has_bias: bool, kernels: Kernels
) -> None:
    x, weight = random(71, size[0]), random(size[1], size[0], seed=1)
    bias = random(size[1], seed=2) if has_bias else None
    out = torch.empty(71, size[1])
    kernels.multiply(x, weight, bias, out)
    close(out, F.linear(x, weight, bias), atol=5e-5)
    for rows in (1, 2, 3, 4, 5, 70):
        fewer = torch.empty(rows, size[1])
        kernels.multiply(x[71 - rows :], weight, bias, fewer)
        assert torch.equal(fewer, out[71 - rows :])


STEPS = {
    "decode": ([1, 1, 1, 1, 1], [1, 16, 17, 300, 600]),
    "prefill": ([5, 16, 33], [5, 16, 33]),
    "continued prefill": ([7, 300, 1], [20, 620, 3]),
    "one token": ([1], [1]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (16, 32), (48, 16)])
def test_attention_and_what_it_writes_equal_the_torch_path(
    name: str, heads: int, kv_heads: int, dtype: torch.dtype, dim: int, block_size: int, kernels: Kernels
) -> None:
    lengths, contexts = STEPS[name]
    max_blocks = -(-max(contexts) // block_size)
    num_blocks = max_blocks * len(lengths)
    caches = []
    for _ in range(2):
        cache = PagedCache.allocate((1, num_blocks, kv_heads, dim), block_size, dtype)
        cache.keys.copy_(random(*cache.keys.shape, seed=1))
        cache.values.copy_(random(*cache.values.shape, seed=2))
        caches.append(cache)
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(len(lengths), max_blocks)
    step = PagedStep(
        lengths=np.array(lengths, dtype=np.int32),
        contexts=np.array(contexts, dtype=np.int32),
        positions=np.concatenate([np.arange(c - n, c, dtype=np.int32) for n, c in zip(lengths, contexts, strict=True)]),
        tables=tables,
    )
    packed = random(sum(lengths), heads + 2 * kv_heads, dim, seed=3)
    q, k, v = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]

    expected = PagedAttention(caches[0], step)(0, q, k, v)
    actual = NativeAttention(kernels, Buffers(), caches[1], heads, step)(0, q, k, v)

    close(actual, expected)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


def config(**change: Any) -> DecoderConfig:
    base: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 50,
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return DecoderConfig.from_hf(base | change)


def paged(decoder: Decoder | FusedDecoder, attend: Any) -> torch.Tensor:
    """Logits of two sequences prefilled together, then one token of each."""
    shape = decoder.config if isinstance(decoder, Decoder) else decoder.decoder.config
    cache = PagedCache.allocate((3, 8, shape.num_kv_heads, 16), 16, torch.float32)
    ids = torch.arange(40) % 50
    tables = np.array([[3, 1, 7], [0, 5, 2]], dtype=np.int32)
    outs = []
    for lengths, contexts in (([20, 15], [20, 15]), ([1, 1], [21, 16])):
        spans = [range(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
        positions = np.array([p for span in spans for p in span], dtype=np.int32)
        step = PagedStep(
            lengths=np.array(lengths, dtype=np.int32),
            contexts=np.array(contexts, dtype=np.int32),
            positions=positions,
            tables=tables,
        )
        positions_T = torch.from_numpy(positions.astype(np.int64))
        hidden = decoder(ids[positions_T], positions_T, attend(cache, step))
        outs.append(decoder.logits(hidden).clone())
    return torch.cat(outs)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "llama", "mlp_bias": True, "attention_bias": True},
    ],
)
@pytest.mark.parametrize("row_by_row", [False, True])
def test_the_fused_decoder_equals_the_decoder_also_after_new_weights(
    change: dict[str, Any], row_by_row: bool, kernels: Kernels
) -> None:
    torch.manual_seed(0)
    decoders = [Decoder(config(**change)) for _ in range(2)]
    with torch.inference_mode():
        for parameter in decoders[0].parameters():
            parameter.add_(0.2 * random(*parameter.shape))
    load_hf_tensors(decoders[1], hf_tensors(decoders[0]))
    fused = FusedDecoder(decoders[1], kernels, Buffers(), max_positions=64, row_by_row=row_by_row)
    for scale in (1.0, 0.9):
        with torch.inference_mode():
            for parameter in decoders[0].parameters():
                parameter.mul_(scale)
        load_hf_tensors(decoders[1], hf_tensors(decoders[0]))
        with torch.inference_mode():
            expected = paged(decoders[0], PagedAttention)
            actual = paged(fused, lambda cache, step: NativeAttention(kernels, Buffers(), cache, 4, step))
        close(actual, expected, atol=2e-5)


def test_without_a_compiler_there_are_no_kernels_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load_kernels.__wrapped__() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot compile today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(broken))
    with caplog.at_level(logging.WARNING):
        assert load_kernels.__wrapped__() is None
    assert "cannot compile today" in caplog.text
    assert not list((tmp_path / "prime-rl").iterdir())


@pytest.mark.usefixtures("kernels")
def test_the_library_is_built_once_and_shares_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = native._build()
    written = library.stat().st_mtime_ns
    assert native._build() == library
    assert library.stat().st_mtime_ns == written
    assert load_kernels.__wrapped__() is not None
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
        assert str(library) in maps.read_text()
        assert all("site-packages" in path for path in loaded), loaded  # none of the system's beside torch's
