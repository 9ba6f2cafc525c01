from itertools import pairwise

import pytest
import torch

from prime_rl.inference.engine import prompt_logprobs
from prime_rl.inference.engine.prompt_logprobs import PromptScorer

VOCAB, HIDDEN = 11, 6
PROMPT = [3, 0, 7, 7, 1, 10, 4]


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(1))


def pieces(scorer: PromptScorer, hidden: torch.Tensor, head: torch.Tensor, *bounds: int) -> PromptScorer:
    for start, end in pairwise(bounds):
        scorer.take(start, hidden[start:end], lambda rows: rows @ head.T)
    return scorer


@pytest.mark.parametrize("bounds", [(0, 7), (0, 1, 2, 7), (0, 6, 7), (0, 3, 5, 6, 7)])
@pytest.mark.parametrize("max_logits", [1, 2 * VOCAB, 1 << 20])
def test_every_token_but_the_first_is_scored_whatever_the_pieces(head, hidden, bounds, max_logits, monkeypatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", max_logits)
    scorer = pieces(PromptScorer(PROMPT, 3, VOCAB), hidden, head, *bounds)
    assert scorer.is_complete
    assert scorer.result[0] is None
    logprobs = (hidden @ head.T).log_softmax(-1)
    for position, entry in enumerate(scorer.result[1:]):
        row = logprobs[position]
        order = row.argsort(descending=True).tolist()
        token = PROMPT[position + 1]
        assert [one[0] for one in entry] == [token, *order[:3]]
        assert [one[1] for one in entry] == pytest.approx([row[i].item() for i in (token, *order[:3])], abs=1e-5)
        assert [one[2] for one in entry] == [order.index(token) + 1, 1, 2, 3]


def test_without_alternatives_there_is_the_token_alone(head, hidden) -> None:
    scorer = pieces(PromptScorer(PROMPT, 0, VOCAB), hidden, head, 0, 7)
    assert [len(entry) for entry in scorer.result[1:]] == [1] * 6


def test_a_prompt_that_begins_anew_is_scored_anew_until_it_was_complete(head, hidden) -> None:
    scorer = pieces(PromptScorer(PROMPT, 1, VOCAB), hidden, head, 0, 4)
    assert not scorer.is_complete
    pieces(scorer, -hidden, head, 0, 7)
    expected = pieces(PromptScorer(PROMPT, 1, VOCAB), -hidden, head, 0, 7).result
    assert scorer.result == expected
    assert pieces(scorer, hidden, head, 0, 7).result == expected


def test_a_prompt_of_one_token_has_nothing_to_score(head, hidden) -> None:
    scorer = PromptScorer([5], 2, VOCAB)
    assert scorer.is_complete
    pieces(scorer, hidden, head, 0, 1)
    assert scorer.result == [None]
