"""The trainer's attention, recomputation, compilation and offload on one NVIDIA GPU."""

import math

import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import empty_decoder, initial_tensors, load_hf_tensors
from prime_rl.models.packed_kernels import Kernel, Ragged, Rectangle, choose_kernel, parts_of
from prime_rl.trainer.model import memory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HEADS, KV_HEADS, DIM = 8, 2, 128
GIB = 1 << 30
KERNELS = [Kernel.SDPA, Kernel.VARLEN, Kernel.HYBRID]


def qkv(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(count)
    return [
        torch.randn(count, heads, DIM, generator=generator, device=CUDA, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def written_out(q: Tensor, k: Tensor, v: Tensor, seq_lens: list[int]) -> Tensor:
    """Softmax attention in float32, with a mask, sequence by sequence."""
    outs = []
    for q_s, k_s, v_s in zip(*(x.float().split(seq_lens) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in (k_s, v_s))
        scores = q_s.transpose(0, 1) @ keys.mT / math.sqrt(DIM)
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool, device=CUDA).triu(1), -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seq_lens", [[300, 4500, 20, 1, 30, 129], [1024] * 4, [4096], [7, 5, 3]])
def test_every_kernel_gives_attention_written_out_and_its_gradients(kernel: Kernel, seq_lens: list[int]) -> None:
    inputs = qkv(sum(seq_lens))
    weights = torch.randn(sum(seq_lens), HEADS, DIM, device=CUDA)
    expected = written_out(*inputs, seq_lens)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    actual = PackedAttention(seq_lens, CUDA, kernel)(0, *inputs)
    assert relative(actual, expected) < 1e-2
    for found, right in zip(torch.autograd.grad((actual.float() * weights).sum(), inputs), wanted, strict=True):
        assert relative(found, right) < 2e-2


def test_attention_in_32_bits_is_exact() -> None:
    seq_lens = [300, 45, 45, 1000]
    inputs = qkv(sum(seq_lens), torch.float32)
    actual = PackedAttention(seq_lens, CUDA, choose_kernel("auto", CUDA, torch.float32))(0, *inputs)
    assert relative(actual, written_out(*inputs, seq_lens)) < 1e-5


@pytest.mark.parametrize(
    ("kernel", "dtype"), [*((kernel, torch.bfloat16) for kernel in KERNELS), (Kernel.SDPA, torch.float32)]
)
def test_no_kernel_makes_a_matrix_of_tokens_by_tokens(kernel: Kernel, dtype: torch.dtype) -> None:
    seq_lens = [20000, 9000, 2000, 1500, 268]
    inputs = qkv(sum(seq_lens), dtype)
    attention = PackedAttention(seq_lens, CUDA, kernel)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(0, *inputs).float().square().sum().backward()
    # One head's matrix of the longest sequence alone is 0.75 GiB in 16 bits, and there are eight.
    assert torch.cuda.max_memory_allocated() - before < 3 * GIB


def test_a_long_document_is_given_to_the_kernel_as_it_lies() -> None:
    assert [type(part) for part in parts_of([300, 16384], CUDA, Kernel.HYBRID)] == [Ragged, Rectangle]
    inputs = qkv(16384)
    attention = PackedAttention([16384], CUDA, Kernel.HYBRID)
    grad = torch.randn(16384, HEADS, DIM, device=CUDA, dtype=torch.bfloat16)
    with torch.profiler.profile(acc_events=True) as profile:
        out = attention(0, *inputs)
        torch.autograd.grad(out, inputs, grad)
    torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::repeat_interleave", "aten::clone", "aten::copy_", "aten::constant_pad_nd"}, names
    assert any("cudnn" in name for name in names), names
    assert out.is_contiguous()


def small_decoder(dtype: torch.dtype) -> Decoder:
    config = DecoderConfig(
        model_type="qwen3", vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=64, qk_norm=True, tie_embeddings=True, init_std=0.1,
    )  # fmt: skip
    decoder = empty_decoder(config, device=CUDA, dtype=dtype)
    load_hf_tensors(decoder, initial_tensors(config, seed=0))
    return decoder


def gradients(decoder: Decoder, seq_lens: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    count = sum(seq_lens)
    ids = torch.arange(count, device=CUDA) * 7 % decoder.vocab_size
    positions = torch.cat([torch.arange(length) for length in seq_lens]).to(CUDA)
    decoder.zero_grad()
    hidden = decoder(ids, positions, PackedAttention(seq_lens, CUDA, decoder.kernel))
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=CUDA).view_as(hidden)).sum().backward()
    return hidden.detach(), {
        name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.grad is not None
    }


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("default")  # torch compiles with warnings of its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "keys",
    [
        {"ac": {}},
        {"ac": {"keep_attention": False}},
        {"ac_offloading": {"max_inflight_activations": 2}},
        {"ac": {"keep_attention": False}, "ac_offloading": {"pin_memory": False}},
        {"compile": {"fullgraph": True}},
        {"compile": {"fullgraph": True}, "ac": {}, "ac_offloading": {}},
        {"compile": {"fullgraph": True}, "ac": {"keep_attention": False}},
        {"compile": {"fullgraph": True}, "ac": {"keep_attention": False}, "ac_offloading": {}},
        {"compile": {"fullgraph": True}, "ac": {"mode": "selective", "targets": ["mlp"]}},
    ],
)
def test_recomputation_compilation_and_offload_change_nothing(keys: dict[str, object], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    decoder, seq_lens = small_decoder(dtype), [4500, 700, 8]
    kernel = choose_kernel("auto", CUDA, dtype)
    decoder.kernel = kernel
    hidden, wanted = gradients(decoder, seq_lens)
    name = str(dtype).removeprefix("torch.")
    memory.apply(decoder, TrainerModelConfig.model_validate({**keys, "optimization_dtype": name}), CUDA)
    assert decoder.kernel is kernel
    # Recomputed and offloaded is the same up to the order of additions in attention's gradients; compiled code also
    # rounds fewer times where it computes in 16 bits.
    limit = 1e-5 if dtype == torch.float32 else 5e-2 if "compile" in keys else 1e-2
    for _ in range(2):
        again, found = gradients(decoder, seq_lens)
        assert relative(again, hidden) < limit
        assert found.keys() == wanted.keys()
        assert max(relative(found[name], wanted[name]) for name in wanted) < limit


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("default")  # torch compiles with warnings of its own
@pytest.mark.parametrize("ac", [{"freq": 2}, {"keep_attention": False, "freq": 2}])
def test_layers_with_adapters_are_compiled_for_every_length_within_the_compilers_limit(
    ac: dict[str, object],
) -> None:
    """tests/unit counts for all ways of recomputing; here the compiler's own code may ask for more versions."""
    torch._dynamo.reset()
    decoder = small_decoder(torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(".q_proj." in name or ".down_proj." in name)
    keys = {"ac": ac, "compile": {"fullgraph": True}, "optimization_dtype": "bfloat16"}
    memory.apply(decoder, TrainerModelConfig.model_validate(keys), CUDA)
    stats = torch._dynamo.utils.counters["stats"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in (1, 7, 4096, 65):
            gradients(decoder, [length])
        before = stats["unique_graphs"]
        for length in (33, 5000, 1):
            gradients(decoder, [length])
    assert stats["unique_graphs"] == before


def test_offload_empties_the_gpu_between_forward_and_backward() -> None:
    held = []
    for offloading in (None, {"max_inflight_activations": 2}):
        decoder = small_decoder(torch.bfloat16)
        config = {"ac": {}, "ac_offloading": offloading, "optimization_dtype": "bfloat16"}
        memory.apply(decoder, TrainerModelConfig.model_validate(config), torch.device("cuda"))
        ids = torch.arange(16384, device=CUDA) % 512
        attention = PackedAttention([16384], CUDA, decoder.kernel)
        before = torch.cuda.memory_allocated()
        hidden = decoder(ids, torch.arange(16384, device=CUDA), attention)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        hidden.sum().backward()
    assert held[1] < 0.6 * held[0]


@pytest.mark.parametrize("keep_attention", [True, False])
def test_no_layer_makes_the_host_wait_for_the_gpu(keep_attention: bool) -> None:
    decoder = small_decoder(torch.bfloat16)
    config = {"ac": {"keep_attention": keep_attention}, "ac_offloading": {}, "optimization_dtype": "bfloat16"}
    memory.apply(decoder, TrainerModelConfig.model_validate(config), CUDA)
    seq_lens = [4500, 700, 8]
    gradients(decoder, seq_lens)  # what is made once: plans, pinned memory
    ids, positions = torch.arange(5208, device=CUDA) % 512, torch.arange(5208, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder(ids, positions, PackedAttention(seq_lens, CUDA, decoder.kernel)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
