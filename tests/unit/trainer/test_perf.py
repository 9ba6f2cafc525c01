import pytest
import torch
from tests.unit.trainer.conftest import HF_CONFIG

from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.trainer.perf import ModelCost, PerfMeter, cost_of, peak_flops, peak_memory_gib
from prime_rl.trainer.ranks import ALONE, Ranks

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def meta(config) -> Decoder:
    with torch.device("meta"):
        return Decoder(DecoderConfig.from_hf(config))


@pytest.fixture(scope="module")
def qwen3() -> ModelCost:
    return cost_of(meta(QWEN3_06B), QWEN3_06B)


def test_flops_per_token_of_a_known_model_at_a_known_length(qwen3):
    # 6 * 595,984,384 weights of matmuls, and attention over 1024 tokens: all pairs, or the causal half of them.
    assert qwen3.published_flops([1024]) == 1024 * (6 * 595_984_384 + 12 * 28 * 16 * 128 * 1024)
    causal = qwen3.true_flops(num_tokens=1024, num_loss_tokens=1024, seq_lens=[1024])
    assert causal == 1024 * 3_928_227_840 == qwen3.published_flops([1024]) - 6 * 28 * 16 * 128 * 1024**2


def test_packing_shorter_sequences_costs_less_attention_and_prompts_cost_no_head(qwen3):
    long = qwen3.true_flops(num_tokens=1024, num_loss_tokens=1024, seq_lens=[1024])
    packed = qwen3.true_flops(num_tokens=1024, num_loss_tokens=1024, seq_lens=[512, 512])
    assert long - packed == 6 * 28 * 16 * 128 * (1024**2 - 2 * 512**2)
    half_prompt = qwen3.true_flops(num_tokens=1024, num_loss_tokens=512, seq_lens=[1024])
    assert long - half_prompt == 6 * 1024 * 151936 * 512


def test_a_frozen_weight_costs_no_gradient_of_its_own():
    model = meta(HF_CONFIG)
    whole = cost_of(model, HF_CONFIG)
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    frozen = cost_of(model, HF_CONFIG)
    trained, head = 32 * 48, 300 * 32
    body = 2 * (32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48)
    assert (whole.trained_weights, whole.frozen_weights, whole.head_weights) == (body, 0, head)
    assert (frozen.trained_weights, frozen.frozen_weights) == (trained, body - trained)
    assert whole.body_flops(10) - frozen.body_flops(10) == 2 * (body - trained) * 10
    assert whole.head_flops(10) - frozen.head_flops(10) == 2 * head * 10


def test_a_window_bounds_the_tokens_that_are_looked_at():
    config = HF_CONFIG | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    cost = cost_of(meta(HF_CONFIG), config)
    assert cost.attention == ((32, 4), (32, None))
    both = {"num_tokens": 0, "num_loss_tokens": 0}
    assert cost.true_flops(**both, seq_lens=[4]) == 2 * 12 * 32 * 8
    # Pairs: 4 x 10 less half the square of the window, and half the square of 10.
    assert cost.true_flops(**both, seq_lens=[10]) == 12 * 32 * (32 + 50)


def test_of_experts_only_the_active_ones_cost_anything():
    model = meta(HF_CONFIG)
    before = cost_of(model, HF_CONFIG).trained_weights
    model.model.layers[0].mlp.experts = torch.nn.Module()
    model.model.layers[0].mlp.experts.gate_up_proj = torch.nn.Parameter(torch.empty(8, 6, 4, device="meta"))
    routed = HF_CONFIG | {"num_experts": 8, "num_experts_per_tok": 2}
    assert cost_of(model, routed).trained_weights - before == 2 * 6 * 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_peak_is_given_where_it_is_known(name, peak):
    assert peak_flops(name) == peak


def test_memory_of_this_process_is_a_plausible_number_of_gib():
    assert 0.05 < peak_memory_gib(torch.device("cpu")) < 100


def test_a_device_without_a_known_peak_has_no_mfu(make_batch, decoder):
    batch = make_batch()
    metrics = PerfMeter(cost_of(decoder, HF_CONFIG), ALONE, "cpu").measure(batch, step_s=4.0, compute_s=2.0)
    assert metrics["perf/throughput"] == batch.num_tokens / 4
    assert metrics["perf/throughput_compute"] == batch.num_tokens / 2
    assert metrics["perf/peak_memory_gib"] > 0
    assert not [name for name in metrics if "mfu" in name]


def test_mfu_is_the_percentage_of_the_peak_of_all_ranks_by_both_conventions(make_batch, decoder):
    batch, cost = make_batch(), cost_of(decoder, HF_CONFIG)
    two = Ranks(rank=0, size=2, device=torch.device("cpu"))
    metrics = PerfMeter(cost, two, "NVIDIA H200").measure(batch, step_s=4.0, compute_s=2.0)
    lengths = [length for row in batch.micro_batches for length in row.seq_lens.tolist()]
    masks = sum(int(row.loss_mask.sum()) for row in batch.micro_batches)
    true = cost.true_flops(num_tokens=batch.num_tokens, num_loss_tokens=masks, seq_lens=lengths)
    published = cost.published_flops([row.num_tokens for row in batch.micro_batches])
    assert true < published
    percent = 100 / (2 * 989e12)
    assert metrics["perf/mfu"] == pytest.approx(percent * true / 4)
    assert metrics["perf/mfu_compute"] == pytest.approx(percent * true / 2)
    assert metrics["perf/mfu_published"] == pytest.approx(percent * published / 4)
    assert metrics["perf/mfu_published_compute"] == pytest.approx(percent * published / 2)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_that_of_its_allocator():
    device = torch.device("cuda")
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert peak_memory_gib(device) >= 0.25
    del held
