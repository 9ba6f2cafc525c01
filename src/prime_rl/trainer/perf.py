"""Speed and memory of training: FLOPs of a step by two conventions, MFU where the device's peak is known, peak memory.

convention   head            attention within a document of L tokens     whose
true         tokens in loss  causal: half of all pairs                   what the mathematics needs
published    all tokens      of all pairs of a row, as if one document   PRIME-RL's figures, which ours stand beside

Neither counts what is computed a second time (activation checkpointing, a head that recomputes its logits). Each is
given over the computation alone (forward, backward, clipping, optimizer) and over the whole step (with the wait for a
batch and the publication of weights).
"""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from prime_rl.data.samples import TrainingBatch
from prime_rl.models.language_model import LanguageModel
from prime_rl.trainer.ranks import Ranks

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
_FROZEN, _TRAINED = 4, 6
"""FLOPs a token and weight: 2 forward, 2 for the gradient of the input and, where it is trained, 2 for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What of a model's shape decides its FLOPs. Weights are those of matmuls; of a router's experts, the active ones.

    Example: a layer of 16 heads of 128 that attends to everything before it has 2,048 attention units and no window.
    """

    frozen_weights: float
    trained_weights: float
    head_weights: int
    is_head_trained: bool
    attention: tuple[tuple[int, int | None], ...]
    """Of each layer that attends: heads times head size, and the tokens that it looks back, itself counted."""

    def body_flops(self, num_tokens: int) -> float:
        """Forward and backward through the matmuls of all layers."""
        return (_FROZEN * self.frozen_weights + _TRAINED * self.trained_weights) * num_tokens

    def head_flops(self, num_tokens: int) -> float:
        """Forward and backward through the head."""
        return (_TRAINED if self.is_head_trained else _FROZEN) * self.head_weights * num_tokens

    def true_flops(self, *, num_tokens: int, num_loss_tokens: int, seq_lens: Sequence[int]) -> float:
        """Of packed documents: causal attention within each, the head on tokens in the loss.

        Queries times keys and weights times values are 2 FLOPs each a pair and unit, and twice that backward.
        """
        mixing = sum(12 * units * _pairs(length, window) for units, window in self.attention for length in seq_lens)
        return self.body_flops(num_tokens) + self.head_flops(num_loss_tokens) + mixing

    def published_flops(self, row_lens: Sequence[int]) -> float:
        """By PRIME-RL's convention: each row is one document, attention is not causal, the head sees every token."""
        num_tokens = sum(row_lens)
        mixing = sum(12 * units * length * length for units, _ in self.attention for length in row_lens)
        return self.body_flops(num_tokens) + self.head_flops(num_tokens) + mixing


def _pairs(length: int, window: int | None) -> float:
    """Pairs of tokens that see each other in a document, the diagonal counted half."""
    seen = length if window is None else min(length, window)
    return seen * length - seen * seen / 2


def cost_of(model: LanguageModel, config: Mapping[str, Any]) -> ModelCost:
    """The cost of `model`; `config` is its `config.json`. Parameters may be on the meta device or sharded."""
    head = model.head_weight
    weights = {True: 0.0, False: 0.0}
    for name, parameter in model.named_parameters():
        if parameter is head or not _is_matmul(model, name, parameter):
            continue
        is_routed = parameter.ndim == 3 or ".experts." in name
        weights[parameter.requires_grad] += parameter.numel() * (_active_share(config) if is_routed else 1.0)
    return ModelCost(
        frozen_weights=weights[False],
        trained_weights=weights[True],
        head_weights=head.numel(),
        is_head_trained=head.requires_grad,
        attention=_attention_layers(config, num_layers=len(model.blocks)),
    )


def _is_matmul(model: LanguageModel, name: str, parameter: nn.Parameter) -> bool:
    """Whether tokens are multiplied by it: any matrix that is not looked up row by row."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return parameter.ndim in (2, 3) and not isinstance(owner, (nn.Embedding, nn.Conv1d))


def _active_share(config: Mapping[str, Any]) -> float:
    """Of the experts of a layer, those that compute a token."""
    num_experts = next(
        (config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config), 1
    )
    return float(config.get("num_experts_per_tok") or num_experts) / float(num_experts)


def _attention_layers(config: Mapping[str, Any], num_layers: int) -> tuple[tuple[int, int | None], ...]:
    heads = config.get("num_attention_heads")
    if not heads:
        return ()
    head_dim = config.get("head_dim") or (
        128 if config.get("model_type") == "qwen3" else config["hidden_size"] // heads
    )
    kinds = list(config.get("layer_types") or ["full_attention"] * num_layers)[:num_layers]
    window = config.get("sliding_window")
    return tuple(
        (heads * head_dim, window if kind == "sliding_attention" else None) for kind in kinds if "attention" in kind
    )


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

    def __init__(self, cost: ModelCost, ranks: Ranks, device_name: str) -> None:
        self._cost = cost
        self._ranks = ranks
        self._peak = peak_flops(device_name)

    def finished(self) -> float:
        """The time in seconds (`time.perf_counter`) once the device has done all that it was given."""
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        return time.perf_counter()

    def measure(self, batch: TrainingBatch, *, step_s: float, compute_s: float) -> dict[str, float]:
        """The metrics of a step: throughput and MFU over the whole step and, `_compute`, over computation alone.

        Called by all ranks with the batch of all of them. `compute_s`: from the start of forward to the end of the
        optimizer's work on the device.
        """
        rows = batch.micro_batches
        metrics = {
            "perf/throughput": batch.num_tokens / step_s,
            "perf/throughput_compute": batch.num_tokens / compute_s,
            "perf/peak_memory_gib": max(self._ranks.gathered(peak_memory_gib(self._ranks.device))),
        }
        if self._peak is None:
            return metrics
        flops = {
            "perf/mfu": self._cost.true_flops(
                num_tokens=batch.num_tokens,
                num_loss_tokens=sum(row.num_loss_tokens for row in rows),
                seq_lens=[length for row in rows for length in row.seq_lens.tolist()],
            ),
            "perf/mfu_published": self._cost.published_flops([row.num_tokens for row in rows]),
        }
        peak = self._peak * self._ranks.size
        for name, count in flops.items():
            metrics[name] = 100 * count / step_s / peak
            metrics[f"{name}_compute"] = 100 * count / compute_s / peak
        return metrics
