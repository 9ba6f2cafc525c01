"""Speed and memory of training: FLOPs of a step, MFU where the device's peak is known, peak memory."""

import resource
import sys
from collections.abc import Sequence
from typing import Final

import torch

from prime_rl.data.samples import TrainingBatch
from prime_rl.models.decoder import DecoderConfig

# Dense bfloat16 peaks in FLOP/s by a part of the device name, from the vendors' data sheets; the first
# match counts.
PEAK_FLOPS: Final = (
    ("A100", 312e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("MI300X", 1307.4e12),
)
_GIB: Final = 1 << 30


def training_flops(config: DecoderConfig, *, num_tokens: int, num_loss_tokens: int, seq_lens: Sequence[int]) -> int:
    """FLOPs that the model needs for forward and backward over packed sequences, without recomputation.

    Each weight of a matmul costs 2 FLOPs a token forward and 4 backward; the head sees tokens in the loss
    only. Causal attention over L tokens costs 6 * L^2 per layer, head and unit of head size.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    body = 6 * config.num_layers * (attention + mlp) * num_tokens
    head = 6 * config.hidden_size * config.vocab_size * num_loss_tokens
    mixing = 6 * config.num_layers * q_size * sum(length * length for length in seq_lens)
    return body + head + mixing


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a device in FLOP/s; None where it is not known."""
    return next((peak for part, peak in PEAK_FLOPS if part in device_name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: of the GPU's allocator, or of this process where it trains on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


class PerfMeter:
    """Turns a batch and the seconds it took into the `perf/` metrics."""

    def __init__(self, config: DecoderConfig, device: torch.device, device_name: str) -> None:
        self._config = config
        self._device = device
        self._peak = peak_flops(device_name)

    def measure(self, batch: TrainingBatch, seconds: float) -> dict[str, float]:
        metrics = {
            "perf/throughput": batch.num_tokens / seconds,
            "perf/peak_memory_gib": peak_memory_gib(self._device),
        }
        if self._peak is not None:
            flops = training_flops(
                self._config,
                num_tokens=batch.num_tokens,
                num_loss_tokens=batch.num_loss_tokens,
                seq_lens=[length for row in batch.micro_batches for length in row.seq_lens.tolist()],
            )
            metrics["perf/mfu"] = 100 * flops / seconds / self._peak
        return metrics
