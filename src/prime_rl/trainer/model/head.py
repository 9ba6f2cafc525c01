"""Language-model head to logprobs and entropies, without ever holding logits of [tokens, vocabulary].

What is held is a slice of the vocabulary for all tokens, [N, C], in the dtype of the weights:

    forward     each slice: logits -> one pass that carries maximum, sums and the target's logit over the slices
    backward    each slice, the last one first: logits -> their gradient, in place -> both matrix products

Slices of the vocabulary, not of the tokens: the products that give the hidden states' gradient keep all N rows, so they
fill a GPU however small the slice; a weight's gradient is one product over all tokens, added up in float32 inside it
and rounded once, where slices of tokens would add float32 [V, H] to memory for every slice.

FLOPs, with k = ceil(N / chunk_tokens) slices. The last slice's logits are kept from forward to backward, in the memory
that the backward pass needs anyway; the other k - 1 are computed again:

    trained head        6 NHV, the least there is, + 2 (k - 1) / k NHV
    frozen head         4 NHV, the least there is: see `_directions`
    without gradients   2 NHV

Memory traffic in elements of [N, V]: forward writes and reads each once; backward reads it three times and writes it
once, and once more what it computes again. All but one read of forward and one read and write of backward are those of
the matrix products themselves.

Shape suffixes: N tokens in the loss, H hidden, V vocabulary, C a slice of the vocabulary.
"""
# mypy: disable-error-code="no-untyped-call"

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

kernels: ModuleType | None
try:
    from prime_rl.trainer.model import gpu_head as kernels
except ImportError:
    kernels = None  # no Triton: PyTorch's own operations do the same in several passes

GPU_LOGITS_BYTES: Final = 5 << 29
"""What `auto` holds on a GPU, 2.5 GiB: in bfloat16 8,833 tokens of a vocabulary of 151,936. A row of 8,192 tokens is
one slice and computes nothing twice; a row of 16,384 is two of 75,968, wide enough for the matmuls' full rate."""
CPU_LOGITS_BYTES: Final = 1 << 28
ALIGNMENT: Final = 128
"""Widths of slices and of rows in memory are multiples of it: whole tiles, and rows that start where tensor cores can
load them, whatever the size of the vocabulary."""
CPU_BLOCK: Final = 1 << 18
"""Logits that PyTorch's own operations take at a time, so that their float32 intermediates stay in a CPU's cache."""
GPU_BLOCK: Final = 1 << 26
"""The same on a GPU without Triton: intermediates of 256 MiB."""
LOWEST: Final = -1e30
"""Below any logit, and finite: (LOWEST - logit) * 0 is 0."""


def resolved_chunk_tokens(
    setting: int | Literal["auto", "disabled"], *, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> int | None:
    """`model.fused_lm_head_chunk_size` as what `token_logprobs` takes."""
    if setting == "disabled":
        return None
    if setting == "auto":
        budget = GPU_LOGITS_BYTES if device.type == "cuda" else CPU_LOGITS_BYTES
        return max(1, budget // (vocab_size * dtype.itemsize))
    return setting


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    chunk_tokens: int | None,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each distribution, in nats, both float32 [N].

    The distribution is softmax(cap(hidden @ weight.T) / temperature), where cap(x) = softcap * tanh(x / softcap)
    (Gemma 2) or x; logits are rounded to the weight's dtype, all after them is float32. Both results carry gradients,
    and entropies cost nothing more where no loss uses them. No tokens give empty results, whose gradients are zeros.

    `chunk_tokens`: as many logits exist at a time as this many tokens have; None: all of them, and none are computed
    twice. `hidden_NH` and `weight_VH` have one dtype.
    """
    assert hidden_NH.dtype == weight_VH.dtype, "the head's weight and the hidden states differ in dtype"
    head = _Head(
        targets_N=targets_N,
        inverse_temperatures_N=temperatures_N.float().reciprocal(),
        chunk_tokens=max(1, len(hidden_NH)) if chunk_tokens is None else chunk_tokens,
        softcap=logit_softcap or 0.0,
        is_differentiated=torch.is_grad_enabled(),
    )
    logprobs_N, entropies_N = TokenLogprobs.apply(hidden_NH, weight_VH, head)
    return logprobs_N, entropies_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What both passes are told besides the tensors that carry gradients."""

    targets_N: Tensor
    inverse_temperatures_N: Tensor
    chunk_tokens: int
    softcap: float
    """0: none."""
    is_differentiated: bool

    def slices(self, num_tokens: int, vocab_size: int) -> list[tuple[int, int]]:
        """Where each slice of the vocabulary starts and ends; their widths differ by less than ALIGNMENT each."""
        width = _aligned(math.ceil(vocab_size / self.count(num_tokens)))
        return [(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)]

    def count(self, num_tokens: int) -> int:
        """How many parts the logits of so many tokens are computed in."""
        return max(1, math.ceil(num_tokens / self.chunk_tokens))

    def rows(self, rows: slice) -> "_Head":
        return _Head(
            targets_N=self.targets_N[rows],
            inverse_temperatures_N=self.inverse_temperatures_N[rows],
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            is_differentiated=self.is_differentiated,
        )


class TokenLogprobs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], head) -> (logprobs [N], entropies [N])."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # None tells the backward pass that no loss used the entropies
        ctx.head, ctx.buffer = head, None
        directions_NH = None
        if head.is_differentiated and ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]:
            logprobs_N, entropies_N, log_sums_N, directions_NH = _directions(hidden_NH, weight_VH, head)
        else:
            logprobs_N, entropies_N, log_sums_N, buffer = _scores(hidden_NH, weight_VH, head)
            ctx.buffer = buffer if head.is_differentiated else None
        ctx.save_for_backward(hidden_NH, weight_VH, log_sums_N, entropies_N, directions_NH)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grads_N: Tensor | None, entropy_grads_N: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_NH, weight_VH, log_sums_N, entropies_N, directions_NH = ctx.saved_tensors
        if logprob_grads_N is None and entropy_grads_N is None:
            return None, None, None
        if logprob_grads_N is None:
            logprob_grads_N = torch.zeros_like(log_sums_N)
        if directions_NH is not None and entropy_grads_N is None:
            return (directions_NH * logprob_grads_N[:, None]).to(hidden_NH.dtype), None, None
        grads = _Grads(log_sums_N, entropies_N, logprob_grads_N.float(), entropy_grads_N)
        buffer, ctx.buffer = ctx.buffer, None  # overwritten: backward through a retained graph computes it again
        hidden_grads, weight_grads = _gradients(
            hidden_NH, weight_VH, ctx.head, grads, buffer, needs_weight=ctx.needs_input_grad[1]
        )
        return hidden_grads if ctx.needs_input_grad[0] else None, weight_grads, None


@dataclass(frozen=True, slots=True)
class _Grads:
    """All float32 [N]: what makes logits their own gradient."""

    log_sums_N: Tensor
    """Logarithm of the sum of exp(logit / temperature) over the vocabulary."""
    entropies_N: Tensor
    logprob_grads_N: Tensor
    entropy_grads_N: Tensor | None


def _aligned(width: int) -> int:
    return math.ceil(width / ALIGNMENT) * ALIGNMENT


def _buffer(hidden_NH: Tensor, width: int) -> Tensor:
    """Room for logits [N, `width`], whose rows are padded so that each starts at an aligned address."""
    return hidden_NH.new_empty(len(hidden_NH), _aligned(width))


def _logits(hidden_NH: Tensor, weight_CH: Tensor, buffer: Tensor) -> Tensor:
    """Logits of one slice, in `buffer` [N, at least C]."""
    logits_NC = buffer[:, : len(weight_CH)]
    return torch.mm(hidden_NH, weight_CH.t(), out=logits_NC)


def _scores(hidden_NH: Tensor, weight_VH: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies and log-sums [N], and the buffer that holds the logits of the last slice."""
    slices = head.slices(len(hidden_NH), len(weight_VH))
    buffer = _buffer(hidden_NH, slices[0][1])
    state_4N = _start(hidden_NH)
    for start, end in slices:
        _scan(_logits(hidden_NH, weight_VH[start:end], buffer), state_4N, head, start)
    return *_finish(state_4N), buffer


def _directions(hidden_NH: Tensor, weight_VH: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies and log-sums [N], and the derivative of each logprob by its hidden state [N, H].

    Where the weight is frozen, a token's gradient is this direction times the gradient of its logprob, one number
    that is not known yet; so the direction is computed while the logits are here, and they need not be again. Chunks
    are of tokens: all logits of a token make its direction.
    """
    directions_NH = torch.empty_like(hidden_NH)
    results = [hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(3)]
    size = max(1, math.ceil(len(hidden_NH) / head.count(len(hidden_NH))))
    buffer = _buffer(hidden_NH[:size], len(weight_VH))
    for start in range(0, len(hidden_NH), size):
        rows = slice(start, start + size)
        part = head.rows(rows)
        logits_NV = _logits(hidden_NH[rows], weight_VH, buffer[: len(part.targets_N)])
        state_4N = _start(logits_NV)
        _scan(logits_NV, state_4N, part, 0)
        for result, values in zip(results, _finish(state_4N), strict=True):
            result[rows] = values
        ones = torch.ones_like(part.inverse_temperatures_N)
        _differentiate(logits_NV, _Grads(results[2][rows], results[1][rows], ones, None), part, 0)
        torch.mm(logits_NV, weight_VH, out=directions_NH[rows])
    return results[0], results[1], results[2], directions_NH


def _gradients(
    hidden_NH: Tensor, weight_VH: Tensor, head: _Head, grads: _Grads, kept: Tensor | None, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden states and weight. `kept`: the buffer of `_scores`, which is overwritten."""
    slices = head.slices(len(hidden_NH), len(weight_VH))
    buffer = _buffer(hidden_NH, slices[0][1]) if kept is None else kept
    weight_grads = torch.empty_like(weight_VH) if needs_weight else None
    hidden_grads: Tensor | None = None
    for start, end in reversed(slices):
        if kept is not None and end == len(weight_VH):
            logits_NC = kept[:, : end - start]
        else:
            logits_NC = _logits(hidden_NH, weight_VH[start:end], buffer)
        _differentiate(logits_NC, grads, head, start)
        if weight_grads is not None:
            torch.mm(logits_NC.t(), hidden_NH, out=weight_grads[start:end])
        added = torch.mm(logits_NC, weight_VH[start:end])
        hidden_grads = added.float() if hidden_grads is None else hidden_grads.add_(added)
    assert hidden_grads is not None
    return hidden_grads.to(hidden_NH.dtype), weight_grads


def _start(like: Tensor) -> Tensor:
    """Of every token over the slices so far: maximum, sum and weighted sum of exponentials, target's logit."""
    state_4N = torch.zeros(4, len(like), device=like.device)
    state_4N[0] = LOWEST
    return state_4N


def _scan(logits_NC: Tensor, state_4N: Tensor, head: _Head, start: int) -> None:
    """Take a slice that begins at `start` into the state.

    With z the scaled logits and m their maximum so far, the sums are s = sum exp(z - m) and w = sum exp(z - m) (z - m).
    A new maximum m' makes them s e and (w + (m - m') s) e, where e = exp(m - m') (online softmax, arXiv 1805.02867).
    """
    if kernels is not None and logits_NC.is_cuda:
        kernels.scan(logits_NC, state_4N, head.targets_N, head.inverse_temperatures_N, start, head.softcap)
        return
    for rows in _blocks(logits_NC):
        part, (maximum, total, weighted, chosen) = head.rows(rows), state_4N[:, rows]
        z_NC = _scaled(logits_NC[rows], part)[0]
        places_N = part.targets_N - start
        is_here_N = (places_N >= 0) & (places_N < z_NC.shape[1])
        at_target_N = z_NC.gather(1, places_N.clamp(0, z_NC.shape[1] - 1)[:, None])[:, 0]
        chosen.copy_(torch.where(is_here_N, at_target_N, chosen))
        highest_N = torch.maximum(maximum, z_NC.amax(dim=1))
        z_NC -= highest_N[:, None]
        exp_NC = z_NC.exp()
        fell_N = maximum - highest_N
        weighted.add_(fell_N * total).mul_(fell_N.exp()).add_(z_NC.mul_(exp_NC).sum(dim=1))
        total.mul_(fell_N.exp()).add_(exp_NC.sum(dim=1))
        maximum.copy_(highest_N)


def _finish(state_4N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and log-sums [N]."""
    maximum_N, total_N, weighted_N, chosen_N = state_4N
    log_total_N = total_N.log()
    return chosen_N - maximum_N - log_total_N, log_total_N - weighted_N / total_N, maximum_N + log_total_N


def _differentiate(logits_NC: Tensor, grads: _Grads, head: _Head, start: int) -> None:
    """Replace the logits of a slice by the gradient of the loss by them.

    With z the scaled logits, p = softmax(z), S the entropy: d logprob / dz = [target] - p and
    d S / dz = -p (log p + S). Scaling is z = cap(x) / temperature, cap'(x) = 1 - tanh(x / softcap)^2.
    """
    if kernels is not None and logits_NC.is_cuda:
        kernels.differentiate(
            logits_NC,
            (grads.log_sums_N, grads.entropies_N, grads.logprob_grads_N, grads.entropy_grads_N),
            (head.targets_N, head.inverse_temperatures_N, start, head.softcap),
        )
        return
    for rows in _blocks(logits_NC):
        part, logprob_grads_N = head.rows(rows), grads.logprob_grads_N[rows]
        z_NC, slope_NC = _scaled(logits_NC[rows], part)
        log_p_NC = z_NC.sub_(grads.log_sums_N[rows, None])
        p_NC = log_p_NC.exp()
        factors: Tensor = -logprob_grads_N[:, None]
        if grads.entropy_grads_N is not None:
            entropy_grads_N = grads.entropy_grads_N[rows, None]
            factors = factors - entropy_grads_N * (log_p_NC + grads.entropies_N[rows, None])
        p_NC *= factors
        places_N = part.targets_N - start
        is_here_N = (places_N >= 0) & (places_N < p_NC.shape[1])
        added_N = torch.where(is_here_N, logprob_grads_N, 0.0)
        p_NC.scatter_add_(1, places_N.clamp(0, p_NC.shape[1] - 1)[:, None], added_N[:, None])
        p_NC *= part.inverse_temperatures_N[:, None]
        logits_NC[rows] = p_NC if slope_NC is None else p_NC.mul_(slope_NC)


def _scaled(logits_NC: Tensor, head: _Head) -> tuple[Tensor, Tensor | None]:
    """New float32 logits after softcap and temperature, and the derivative of the softcap (None: 1)."""
    if not head.softcap:
        return logits_NC.float() * head.inverse_temperatures_N[:, None], None
    tanh_NC = (logits_NC.float() / head.softcap).tanh_()
    return tanh_NC * (head.softcap * head.inverse_temperatures_N[:, None]), 1 - tanh_NC.square()


def _blocks(logits_NC: Tensor) -> Iterator[slice]:
    """Rows to take at a time."""
    size = max(1, (GPU_BLOCK if logits_NC.is_cuda else CPU_BLOCK) // logits_NC.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits_NC), size))
