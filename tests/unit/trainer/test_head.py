import math

import pytest
import torch

from prime_rl.trainer.head import token_logprobs

VOCAB = 11


def inputs(count: int, *, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(count, 5, generator=generator, requires_grad=True)
    weight_VH = torch.randn(VOCAB, 5, generator=generator, requires_grad=True)
    targets_N = torch.randint(0, VOCAB, (count,), generator=generator)
    temperatures_N = torch.rand(count, generator=generator) + 0.5
    return hidden_NH, weight_VH, targets_N, temperatures_N


def test_logprobs_and_entropies_are_those_of_the_tempered_softmax():
    hidden, weight, targets, temperatures = inputs(7)
    logprobs, entropies = token_logprobs(lambda h: h @ weight.T, hidden, targets, temperatures, vocab_size=VOCAB)
    probs = torch.softmax((hidden @ weight.T).double() / temperatures[:, None].double(), dim=-1)
    expected = probs[torch.arange(7), targets].log()
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)
    assert torch.allclose(entropies.double(), -(probs * probs.log()).sum(-1), atol=1e-6)
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_each_token_has_its_own_temperature():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    targets, temperatures = torch.tensor([1, 1]), torch.tensor([1.0, 0.5])
    logprobs, _ = token_logprobs(lambda h: h, logits, targets, temperatures, vocab_size=2)
    expected = [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(-2))]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_equal_logits_have_the_entropy_of_the_vocabulary():
    _, entropies = token_logprobs(lambda h: h, torch.zeros(3, 8), torch.zeros(3).long(), torch.ones(3), vocab_size=8)
    assert entropies.tolist() == pytest.approx([math.log(8)] * 3)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    seen: list[int] = []

    def run(max_elements: int):
        hidden, weight, targets, temperatures = inputs(7)

        def logits(h):
            seen.append(len(h))
            return h @ weight.T

        logprobs, entropies = token_logprobs(
            logits, hidden, targets, temperatures, vocab_size=VOCAB, max_chunk_elements=max_elements
        )
        (logprobs * torch.arange(7)).sum().backward()
        return logprobs, entropies, hidden.grad, weight.grad

    whole = run(7 * VOCAB)
    assert seen == [7]
    seen.clear()
    chunked = run(chunk_tokens * VOCAB)
    assert max(seen) == chunk_tokens
    for one, other in zip(whole, chunked, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_half_precision_logits_are_normalised_in_float32():
    hidden, weight, targets, temperatures = inputs(4)
    logprobs, entropies = token_logprobs(
        lambda h: (h @ weight.T).bfloat16(), hidden, targets, temperatures, vocab_size=VOCAB
    )
    assert logprobs.dtype == entropies.dtype == torch.float32


def test_no_tokens_give_no_logprobs_and_a_gradient_of_zero():
    hidden, weight, targets, temperatures = inputs(3)
    logprobs, entropies = token_logprobs(
        lambda h: h @ weight.T, hidden[:0], targets[:0], temperatures[:0], vocab_size=VOCAB
    )
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.abs().sum() == weight.grad.abs().sum() == 0
