"""The head's kernels compute what PyTorch computes, at a real model's size, within the memory that it is given."""

import pytest
import torch
from torch import Tensor

from prime_rl.trainer.model import head
from prime_rl.trainer.model.head import resolved_chunk_tokens, token_logprobs

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCAB = 151_936
GIB = 2**30


def inputs(count: int, hidden: int, dtype: torch.dtype, vocab: int = VOCAB):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden_NH = torch.randn(count, hidden, device=DEVICE, generator=generator).to(dtype).requires_grad_()
    weight_VH = (torch.randn(vocab, hidden, device=DEVICE, generator=generator) / hidden**0.5).to(dtype)
    targets_N = torch.randint(0, vocab, (count,), device=DEVICE, generator=generator)
    targets_N[:2] = torch.tensor([0, vocab - 1])
    temperatures_N = torch.rand(count, device=DEVICE, generator=generator) + 0.5
    return hidden_NH, weight_VH.requires_grad_(), targets_N, temperatures_N


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, softcap: float | None):
    logits_NV = hidden @ weight.T
    if softcap is not None:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    logprobs_NV = torch.log_softmax(logits_NV / temperatures[:, None], dim=-1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets[:, None])[:, 0], entropies_N


def error(one: Tensor, other: Tensor) -> float:
    """Relative, in the norm; NaN where anything was left unwritten."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("vocab", [VOCAB, 50_257])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [None, 40])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_those_of_the_plain_head_in_float64(vocab, softcap, chunk_tokens, frozen):
    hidden, weight, targets, temperatures = inputs(100, 64, torch.float32, vocab)
    weight.requires_grad_(not frozen)
    logprobs, entropies = token_logprobs(
        hidden, weight, targets, temperatures, chunk_tokens=chunk_tokens, logit_softcap=softcap
    )
    exact_hidden, exact_weight = hidden.detach().double().requires_grad_(), weight.detach().double()
    exact_weight.requires_grad_(not frozen)
    expected = plain(exact_hidden, exact_weight, targets, temperatures.double(), softcap)
    coefficients = torch.linspace(-1, 2, 100, device=DEVICE)
    for use_entropies in (False, True):
        hidden.grad = weight.grad = exact_hidden.grad = exact_weight.grad = None
        ((logprobs - 3 * entropies if use_entropies else logprobs) * coefficients).sum().backward(retain_graph=True)
        exact = expected[0] - 3 * expected[1] if use_entropies else expected[0]
        (exact * coefficients).sum().backward(retain_graph=True)
        assert error(hidden.grad, exact_hidden.grad) < 1e-5
        assert frozen or error(weight.grad, exact_weight.grad) < 1e-5
    assert error(logprobs, expected[0]) < 1e-5
    assert error(entropies, expected[1]) < 1e-5


def test_kernels_and_pytorchs_operations_agree_in_bfloat16(monkeypatch):
    def run():
        hidden, weight, targets, temperatures = inputs(300, 128, torch.bfloat16)
        logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=100)
        (logprobs + 0.1 * entropies).sum().backward()
        return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad

    assert head.kernels is not None
    by_kernels = run()
    monkeypatch.setattr(head, "kernels", None)
    by_operations = run()
    for one, other, limit in zip(by_kernels, by_operations, (1e-6, 1e-5, 5e-3, 5e-3), strict=True):
        assert error(one, other) < limit


@pytest.mark.parametrize("frozen", [False, True])
def test_a_row_of_16384_tokens_stays_within_the_chunk_and_its_gradients(frozen):
    hidden, weight, targets, temperatures = inputs(16_384, 1024, torch.bfloat16)
    weight.requires_grad_(not frozen)
    chunk = resolved_chunk_tokens("auto", vocab_size=VOCAB, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=chunk)
    logprobs.sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(tensor.nbytes for tensor in (hidden, weight))
    assert 2 * GIB < peak < 2.6 * GIB + 4 * grads
