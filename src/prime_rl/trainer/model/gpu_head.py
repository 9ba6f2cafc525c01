"""What stands between the matrix products of the language-model head on a GPU, in Triton. `head` calls it.

Each kernel reads a slice of logits [N, C] once, at the speed of memory, and computes in float32. The formulas are
those of `head._scan` and `head._differentiate`, which compute the same on a CPU.

Triton comes with PyTorch's CUDA builds; import this module only where it is.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: PLR0913, PLR0917 (a kernel is told of its memory and sizes one by one)

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _scaled(logits, softcap, inverse_temperature, HAS_CAP: tl.constexpr):
    """Scaled logits, and the tanh inside the softcap (without one: anything)."""
    x = logits.to(tl.float32)
    tanh = x
    if HAS_CAP:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0
        x = tanh * softcap
    return x * inverse_temperature, tanh


@triton.jit
def _scan(
    logits, state, targets, inverse_temperatures, softcap, start, width, stride, count,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    inverse_temperature = tl.load(inverse_temperatures + token)
    maximum = tl.load(state + token)
    total = tl.load(state + count + token)
    weighted = tl.load(state + 2 * count + token)
    for first in range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = c < width
        z, _ = _scaled(tl.load(row + c, mask=mask, other=0.0), softcap, inverse_temperature, HAS_CAP)
        z = tl.where(mask, z, float("-inf"))
        highest = tl.maximum(maximum, tl.max(z, 0))
        below = z - highest
        exp = tl.exp(below)
        fell = maximum - highest
        weighted = (weighted + fell * total) * tl.exp(fell) + tl.sum(tl.where(mask, exp * below, 0.0), 0)
        total = total * tl.exp(fell) + tl.sum(exp, 0)
        maximum = highest
    tl.store(state + token, maximum)
    tl.store(state + count + token, total)
    tl.store(state + 2 * count + token, weighted)
    place = tl.load(targets + token) - start
    is_here = (place >= 0) & (place < width)
    chosen, _ = _scaled(tl.load(row + place, mask=is_here, other=0.0), softcap, inverse_temperature, HAS_CAP)
    tl.store(state + 3 * count + token, chosen, mask=is_here)


def scan(
    logits_NC: Tensor, state_4N: Tensor, targets_N: Tensor, inverse_temperatures_N: Tensor, start: int, softcap: float
) -> None:
    """Take a slice of the vocabulary that begins at `start` into the state, which is float32 and contiguous."""
    count, width = logits_NC.shape
    assert state_4N.is_contiguous()
    assert logits_NC.stride(1) == 1
    if count == 0:
        return
    _scan[(count,)](
        logits_NC, state_4N, targets_N.contiguous(), inverse_temperatures_N.contiguous(), softcap, start, width,
        logits_NC.stride(0), count, HAS_CAP=softcap != 0.0, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _differentiate(
    logits, log_sums, entropies, logprob_grads, entropy_grads, targets, inverse_temperatures, softcap, start, width,
    stride, HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    at = logits + token * stride + c
    inverse_temperature = tl.load(inverse_temperatures + token)
    logprob_grad = tl.load(logprob_grads + token)
    z, tanh = _scaled(tl.load(at, mask=mask, other=0.0), softcap, inverse_temperature, HAS_CAP)
    log_p = z - tl.load(log_sums + token)
    factor = -logprob_grad
    if HAS_ENTROPY:
        factor -= tl.load(entropy_grads + token) * (log_p + tl.load(entropies + token))
    grad = tl.exp(log_p) * factor
    grad = tl.where(c == tl.load(targets + token) - start, grad + logprob_grad, grad) * inverse_temperature
    if HAS_CAP:
        grad *= 1.0 - tanh * tanh
    tl.store(at, grad.to(logits.dtype.element_ty), mask=mask)


def differentiate(
    logits_NC: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
    head: tuple[Tensor, Tensor, int, float],
) -> None:
    """Replace the logits of a slice by the gradient of the loss by them.

    `grads`: log-sums, entropies, gradients of logprobs and of entropies (None: zero), float32 [N]. `head`: targets [N],
    inverse temperatures [N], where the slice begins, softcap (0: none).
    """
    log_sums_N, entropies_N, logprob_grads_N, entropy_grads_N = grads
    targets_N, inverse_temperatures_N, start, softcap = head
    count, width = logits_NC.shape
    assert logits_NC.stride(1) == 1
    if count == 0:
        return
    _differentiate[(count, triton.cdiv(width, BLOCK))](
        logits_NC, log_sums_N.contiguous(), entropies_N.contiguous(), logprob_grads_N.contiguous(),
        logprob_grads_N if entropy_grads_N is None else entropy_grads_N.contiguous(), targets_N.contiguous(),
        inverse_temperatures_N.contiguous(), softcap, start, width, logits_NC.stride(0),
        HAS_ENTROPY=entropy_grads_N is not None, HAS_CAP=softcap != 0.0, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
