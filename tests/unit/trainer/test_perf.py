import pytest
import torch

from prime_rl.models.decoder import DecoderConfig
from prime_rl.trainer.perf import PerfMeter, peak_flops, peak_memory_gib, training_flops

QWEN3_06B = DecoderConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


def test_flops_per_token_of_a_known_model_at_a_known_length():
    flops = training_flops(QWEN3_06B, num_tokens=1024, num_loss_tokens=1024, seq_lens=[1024])
    # 6 * 595,984,384 weights of matmuls, and causal attention over 1024 tokens.
    assert flops == 1024 * 3_928_227_840


def test_packing_shorter_sequences_costs_less_attention_and_prompts_cost_no_head():
    long = training_flops(QWEN3_06B, num_tokens=1024, num_loss_tokens=1024, seq_lens=[1024])
    packed = training_flops(QWEN3_06B, num_tokens=1024, num_loss_tokens=1024, seq_lens=[512, 512])
    assert long - packed == 6 * 28 * 16 * 128 * (1024**2 - 2 * 512**2)
    half_prompt = training_flops(QWEN3_06B, num_tokens=1024, num_loss_tokens=512, seq_lens=[1024])
    assert long - half_prompt == 6 * 1024 * 151936 * 512


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
    metrics = PerfMeter(decoder.config, torch.device("cpu"), "cpu").measure(batch, seconds=2.0)
    assert metrics["perf/throughput"] == batch.num_tokens / 2
    assert metrics["perf/peak_memory_gib"] > 0
    assert "perf/mfu" not in metrics


def test_mfu_is_the_percentage_of_the_peak_that_the_model_needed(make_batch, decoder):
    batch = make_batch()
    lengths = [length for row in batch.micro_batches for length in row.seq_lens.tolist()]
    flops = training_flops(
        decoder.config, num_tokens=batch.num_tokens, num_loss_tokens=batch.num_loss_tokens, seq_lens=lengths
    )
    meter = PerfMeter(decoder.config, torch.device("cpu"), "NVIDIA H200")
    assert meter.measure(batch, seconds=2.0)["perf/mfu"] == pytest.approx(100 * flops / 2 / 989e12)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_that_of_its_allocator():
    device = torch.device("cuda")
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert peak_memory_gib(device) >= 0.25
    del held
