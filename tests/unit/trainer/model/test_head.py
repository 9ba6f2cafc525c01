import math

import pytest
import torch
from torch import Tensor

from prime_rl.trainer.model import head
from prime_rl.trainer.model.head import resolved_chunk_tokens, token_logprobs

VOCAB, HIDDEN = 500, 5


def inputs(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(count, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(0, VOCAB, (count,), generator=generator)
    targets_N[:2] = torch.tensor([0, VOCAB - 1])[:count]
    temperatures_N = torch.rand(count, generator=generator) + 0.5
    return hidden_NH, weight_VH, targets_N, temperatures_N


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, softcap: float | None = None):
    """All logits at once, differentiated by autograd."""
    logits_NV = hidden @ weight.T
    if softcap is not None:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    logprobs_NV = torch.log_softmax(logits_NV / temperatures[:, None], dim=-1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets[:, None])[:, 0], entropies_N


def counted_matmuls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every logits matmul from now on."""
    shapes: list[tuple[int, ...]] = []
    compute = head._logits

    def counting(hidden_NH: Tensor, weight_CH: Tensor, buffer: Tensor) -> Tensor:
        shapes.append((len(hidden_NH), len(weight_CH)))
        return compute(hidden_NH, weight_CH, buffer)

    monkeypatch.setattr(head, "_logits", counting)
    return shapes


def close(one: Tensor, other: Tensor) -> bool:
    """Within 1e-5 of the largest value."""
    return float((one.double() - other.double()).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("uses", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [None, 7, 3, 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_those_of_the_plain_head(chunk_tokens, softcap, uses, frozen):
    def run(fused: bool):
        hidden, weight, targets, temperatures = inputs(9)
        weight.requires_grad_(not frozen)
        if fused:
            results = token_logprobs(
                hidden, weight, targets, temperatures, chunk_tokens=chunk_tokens, logit_softcap=softcap
            )
        else:
            wide = [tensor.double() for tensor in (hidden, weight, targets, temperatures)]
            results = plain(wide[0], wide[1], targets, wide[3], softcap)
        coefficients = torch.linspace(-1, 2, 9)
        terms = [(result * coefficients).sum() for result in results]
        {"logprobs": terms[0], "entropies": terms[1], "both": terms[0] - 3 * terms[1]}[uses].backward()
        return *results, hidden.grad, weight.grad

    for fused, reference in zip(run(True), run(False), strict=True):
        assert (fused is None and reference is None) or close(fused.detach(), reference.detach())


def test_tied_embeddings_gather_the_gradients_of_both_uses():
    def run(score):
        _, weight, targets, temperatures = inputs(9)
        hidden = torch.nn.functional.embedding(torch.arange(9) * 7, weight).tanh()
        score(hidden, weight, targets, temperatures).sum().backward()
        return weight.grad

    fused = run(lambda *tensors: token_logprobs(*tensors, chunk_tokens=3)[0])
    assert close(fused, run(lambda *tensors: plain(*tensors)[0]))


def test_each_token_has_its_own_temperature():
    targets, temperatures = torch.tensor([1, 1]), torch.tensor([1.0, 0.5])
    logprobs, _ = token_logprobs(
        torch.ones(2, 1), torch.tensor([[0.0], [1.0]]), targets, temperatures, chunk_tokens=None
    )
    expected = [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(-2))]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_equal_logits_have_the_entropy_of_the_vocabulary():
    _, entropies = token_logprobs(
        torch.zeros(3, 4), torch.zeros(VOCAB, 4), torch.zeros(3).long(), torch.ones(3), chunk_tokens=1
    )
    assert entropies.tolist() == pytest.approx([math.log(VOCAB)] * 3)


def test_logits_far_apart_neither_overflow_nor_lose_the_entropy():
    weight = torch.tensor([[300.0], [299.0], *[[-300.0]] * (VOCAB - 2)])
    logprobs, entropies = token_logprobs(
        torch.ones(1, 1), weight, torch.tensor([VOCAB - 1]), torch.ones(1), chunk_tokens=None
    )
    p = 1 / (1 + math.exp(-1))
    assert float(logprobs) == pytest.approx(-600 + math.log(p), rel=1e-6)
    assert float(entropies) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)


def test_slices_bound_the_logits_and_only_the_last_is_kept(monkeypatch):
    shapes = counted_matmuls(monkeypatch)
    hidden, weight, targets, temperatures = inputs(8)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=2)
    forward = [(8, 128)] * 3 + [(8, VOCAB - 3 * 128)]
    assert shapes == forward
    logprobs.sum().backward()
    assert shapes[4:] == [(8, 128)] * 3


def test_what_fits_into_one_slice_is_computed_once(monkeypatch):
    shapes = counted_matmuls(monkeypatch)
    hidden, weight, targets, temperatures = inputs(8)
    for chunk_tokens in (8, None):
        shapes.clear()
        token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=chunk_tokens)[0].sum().backward()
        assert shapes == [(8, VOCAB)]


def test_a_frozen_head_is_computed_once_in_chunks_of_tokens(monkeypatch):
    shapes = counted_matmuls(monkeypatch)
    hidden, weight, targets, temperatures = inputs(8)
    token_logprobs(hidden, weight.detach(), targets, temperatures, chunk_tokens=3)[0].sum().backward()
    assert shapes == [(3, VOCAB), (3, VOCAB), (2, VOCAB)]


def test_a_retained_graph_gives_the_same_gradients_again():
    hidden, weight, targets, temperatures = inputs(8)
    total = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=3)[0].sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_scoring_without_gradients_keeps_nothing(monkeypatch):
    shapes = counted_matmuls(monkeypatch)
    hidden, weight, targets, temperatures = inputs(8)
    expected = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=None)
    shapes.clear()
    with torch.no_grad():
        scored = token_logprobs(hidden, weight.requires_grad_(False), targets, temperatures, chunk_tokens=4)
    assert len(shapes) == 2
    assert not any(result.requires_grad for result in scored)
    assert all(close(one, other.detach()) for one, other in zip(scored, expected, strict=True))


def test_half_precision_logits_are_normalised_in_float32():
    hidden, weight, targets, temperatures = inputs(8, dtype=torch.bfloat16)
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=3)
    assert logprobs.dtype == entropies.dtype == torch.float32
    rounded = (hidden @ weight.T).double() / temperatures[:, None]  # only the logits are rounded
    expected = torch.log_softmax(rounded, dim=-1).gather(1, targets[:, None])[:, 0]
    assert close(logprobs.detach(), expected.detach())
    logprobs.sum().backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    plain(exact_hidden, exact_weight, targets, temperatures)[0].sum().backward()
    for grad, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert grad.dtype == torch.bfloat16
        assert float((grad.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tokens_give_no_logprobs_and_a_gradient_of_zero(frozen):
    hidden, weight, targets, temperatures = inputs(3)
    weight.requires_grad_(not frozen)
    logprobs, entropies = token_logprobs(hidden[:0], weight, targets[:0], temperatures[:0], chunk_tokens=2)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.abs().sum() == 0
    assert frozen or weight.grad.abs().sum() == 0


def test_auto_holds_more_logits_on_a_gpu_than_on_a_cpu():
    def auto(dtype, device):
        return resolved_chunk_tokens("auto", vocab_size=151936, dtype=dtype, device=torch.device(device))

    assert auto(torch.bfloat16, "cuda") == 8833
    assert auto(torch.float32, "cuda") == 4416
    assert auto(torch.float32, "cpu") == 441
    cpu = torch.device("cpu")
    assert resolved_chunk_tokens(1024, vocab_size=9, dtype=torch.float32, device=cpu) == 1024
    assert resolved_chunk_tokens("disabled", vocab_size=9, dtype=torch.float32, device=cpu) is None
