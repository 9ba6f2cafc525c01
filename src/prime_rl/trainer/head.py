"""Language-model head to logprobs: the one place where logits of [tokens, vocabulary] exist.

A fused head replaces this function and nothing else. Shape suffixes: N tokens in the loss, H hidden, V
vocabulary.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_ELEMENTS: Final = 1 << 26
"""Logits computed at a time: 256 MiB of float32."""

Logits = Callable[[Tensor], Tensor]


def token_logprobs(
    logits: Logits,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    vocab_size: int,
    max_chunk_elements: int = MAX_CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each distribution, in nats, both float32 [N].

    The distribution is softmax(logits(hidden) / temperature), in float32 whatever the dtype of the matmul.
    Logprobs carry gradients, entropies do not. With more than one chunk the logits are computed again in
    the backward pass, so that memory stays bounded by the chunk.
    """
    chunk_tokens = max(1, max_chunk_elements // vocab_size)
    if hidden_NH.shape[0] <= chunk_tokens:
        return _chunk(logits, hidden_NH, targets_N, temperatures_N)
    pieces = zip(
        hidden_NH.split(chunk_tokens),
        targets_N.split(chunk_tokens),
        temperatures_N.split(chunk_tokens),
        strict=True,
    )
    results = [checkpoint(_chunk, logits, *piece, use_reentrant=False) for piece in pieces]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(logits: Logits, hidden_NH: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    scaled_NV = logits(hidden_NH).float() / temperatures_N[:, None]
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    with torch.no_grad():
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropies_N
