import logging

import pytest
import torch
import torch.nn.functional as F

from prime_rl.errors import ConfigError
from prime_rl.models import packed_kernels
from prime_rl.models.attention import PackedAttention
from prime_rl.models.packed_kernels import (
    Kernel,
    Ragged,
    Rectangle,
    causal_attention,
    choose_kernel,
    padded_length,
    parts_of,
)

CPU = torch.device("cpu")
LONGEST = 70000


def heads(count: int, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, number, 16, generator=generator, requires_grad=True) for number in (4, 2, 2)]


def of_one_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention with a mask, in float64."""
    k, v = (x.double().repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def packed(inputs: list[torch.Tensor], seq_lens: list[int]) -> torch.Tensor:
    pieces = zip(*(x.split(seq_lens) for x in inputs), strict=True)
    return torch.cat([of_one_sequence(*piece) for piece in pieces])


def test_padded_lengths_are_few_and_waste_at_most_an_eighth():
    lengths = {padded_length(length) for length in range(4096, LONGEST)}
    assert len(lengths) <= 8 * 4 + 2
    for length in (1, 2, 127, 128, 129, 1025, 2049, 4097, 65535):
        padded = padded_length(length)
        assert length <= padded <= max(length + 127, length * 9 / 8)
    assert [padded_length(n) for n in (5000, 9000, 16384, 65536)] == [5120, 9216, 16384, 65536]


def test_one_long_document_is_one_call_without_padding():
    for length in (8192, 16384, 65536):
        assert parts_of([length], CPU, Kernel.HYBRID) == [Rectangle(sequences=1, length=length, padded=length)]
    assert parts_of([1024] * 16, CPU, Kernel.HYBRID) == [Rectangle(sequences=16, length=1024, padded=1024)]


def test_neighbouring_short_sequences_share_a_call_between_long_ones():
    parts = parts_of([300, 9000, 20, 20, 30, 128, 5000, 5000], CPU, Kernel.HYBRID)
    first, long, short, *last = parts
    assert isinstance(first, Ragged)
    assert first.bounds.tolist() == [0, 300]
    assert long == Rectangle(sequences=1, length=9000, padded=9216)
    assert isinstance(short, Ragged)
    assert (short.bounds.tolist(), short.longest, short.bounds.dtype) == ([0, 20, 40, 70, 198], 128, torch.int32)
    assert last == [Rectangle(sequences=1, length=5000, padded=5120)] * 2
    assert sum(part.num_tokens for part in parts) == 19498


def test_a_row_cut_into_parts_gives_the_values_and_gradients_of_each_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
        lengths = bounds.diff().tolist()
        assert longest == max(lengths)
        return packed([q, k, v], lengths).float()

    monkeypatch.setattr(packed_kernels, "LONG", 12)
    monkeypatch.setattr(packed_kernels, "_MIN_STEP", 4)
    monkeypatch.setattr(packed_kernels, "_ragged_function", lambda kernel: ragged)
    seq_lens = [3, 13, 4, 4, 4, 7, 2, 21, 1]
    kinds = [type(part) for part in parts_of(seq_lens, CPU, Kernel.HYBRID)]
    assert kinds == [Ragged, Rectangle, Rectangle, Ragged, Rectangle, Ragged]
    inputs = heads(sum(seq_lens))
    weights = torch.randn(sum(seq_lens), 4, 16)
    expected = packed(inputs, seq_lens)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for kernel in (Kernel.HYBRID, Kernel.VARLEN, Kernel.SDPA):
        actual = PackedAttention(seq_lens, CPU, kernel)(0, *inputs)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)
        for found, right in zip(torch.autograd.grad((actual * weights).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=5e-6)


def test_attention_of_a_rectangle_makes_no_matrix_and_copies_no_heads():
    q, k, v = (x.view(1, 64, -1, 16).transpose(1, 2) for x in heads(64))
    with torch.profiler.profile(acc_events=True) as profile:
        out = causal_attention(q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert not names & {"aten::repeat_interleave", "aten::softmax", "aten::bmm", "aten::baddbmm"}
    assert out.transpose(1, 2).is_contiguous()


def test_a_cpu_attends_by_sdpa_whatever_is_asked_for_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        assert choose_kernel("auto", CPU, torch.float32) is Kernel.SDPA
        assert not caplog.records
        assert choose_kernel("flash_attention_2", CPU, torch.bfloat16) is Kernel.SDPA
    assert "flash_attention_2 needs an NVIDIA GPU" in caplog.text


@pytest.mark.parametrize(
    ("capability", "installed", "kernel"),
    [
        ((10, 0), Kernel.FLASH_4, Kernel.FLASH_4),
        ((9, 0), Kernel.FLASH_3, Kernel.FLASH_3),
        ((9, 0), Kernel.FLASH_2, Kernel.HYBRID),  # cuDNN is faster than FlashAttention 2 there
        ((8, 0), Kernel.FLASH_2, Kernel.FLASH_2),
        ((9, 0), None, Kernel.HYBRID),
    ],
)
def test_auto_takes_the_flash_attention_of_the_gpus_generation_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: Kernel | None, kernel: Kernel
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(packed_kernels, "_flash_function", lambda kernel: F.relu if kernel is installed else None)
    cuda = torch.device("cuda")
    assert choose_kernel("auto", cuda, torch.bfloat16) is kernel
    assert choose_kernel("auto", cuda, torch.float32) is Kernel.SDPA
    assert choose_kernel("varlen", cuda, torch.bfloat16) is Kernel.VARLEN


def test_a_kernel_that_is_missing_or_does_not_compute_in_the_dtype_is_refused():
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="cannot be imported; install flash-attn-3, or set attn to auto"):
        choose_kernel("flash_attention_3", cuda, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"optimization_dtype is float32; set that to bfloat16"):
        choose_kernel("flash_attention_2", cuda, torch.float32)


@pytest.mark.parametrize("style", ["flash", "torch", "older torch"])
def test_ragged_kernels_are_called_by_the_names_their_version_has(monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    seen: dict[str, object] = {}

    def flash(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, causal=False):
        seen.update(bounds=cu_seqlens_q, same=cu_seqlens_k, longest=max_seqlen_q, causal=causal)
        return q, None

    def torch_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        seen.update(bounds=cu_seq_q, same=cu_seq_k, longest=max_q, causal=window_size == (-1, 0) and enable_gqa)
        return query

    def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        seen.update(bounds=cu_seq_q, same=cu_seq_k, longest=max_q, causal=is_causal)
        return query

    kernel = Kernel.FLASH_4 if style == "flash" else Kernel.VARLEN
    monkeypatch.setattr(packed_kernels, "_flash_function", lambda kernel: flash)
    varlen = torch_2_13 if style == "torch" else torch_2_10
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    packed_kernels._ragged_function.cache_clear()
    q, k, v = heads(5)
    (part,) = parts_of([2, 3], CPU, kernel)
    assert part(q, k, v) is q
    packed_kernels._ragged_function.cache_clear()
    assert isinstance(part, Ragged)
    assert seen == {"bounds": part.bounds, "same": part.bounds, "longest": 3, "causal": True}
