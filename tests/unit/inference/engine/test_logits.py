from typing import Any

import pytest
import torch

from prime_rl.inference.backend import RequestError, SamplingParams
from prime_rl.inference.engine.logits import edit, edits
from prime_rl.inference.engine.scheduler import Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
NEVER = -torch.inf


def edited(prompt: list[int] | None = None, completion: list[int] | None = None, **params: Any) -> list[float]:
    prompt = prompt or [0]
    sequence = Sequence(
        request_id="a",
        tokens=prompt + (completion or []),
        prompt_len=len(prompt),
        sampling=SamplingParams(**({"max_tokens": 8} | params)),
        stop_ids=frozenset(params.get("stop_token_ids", ())),
        seed=0,
    )
    assert edits(sequence.sampling)
    logits = LOGITS.clone()
    edit(logits, sequence)
    return logits.tolist()


def test_nothing_is_edited_unless_it_is_asked_for() -> None:
    assert not edits(SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=1))


def test_only_allowed_tokens_remain() -> None:
    assert edited(allowed_token_ids=(1, 4)) == [NEVER, 1.0, NEVER, NEVER, -3.0]


def test_biases_are_added() -> None:
    assert edited(logit_bias=((0, -100.0), (4, 3.5))) == [-98.0, 1.0, 0.0, -1.0, 0.5]


def test_a_bad_word_is_not_completed_and_its_beginning_is_free() -> None:
    assert edited(bad_words=((3,),)) == [2.0, 1.0, 0.0, NEVER, -3.0]
    assert edited(bad_words=((1, 2, 3),), completion=[1]) == LOGITS.tolist()
    assert edited(bad_words=((1, 2, 3),), completion=[1, 2]) == [2.0, 1.0, 0.0, NEVER, -3.0]
    assert edited(bad_words=((1, 2, 3),), completion=[2, 1]) == LOGITS.tolist()
    assert edited(bad_words=((1, 2),), prompt=[1]) == LOGITS.tolist()  # the prompt is not part of it


@pytest.mark.parametrize(("completion", "held_back"), [([], True), ([1], True), ([1, 1], False)])
def test_stop_tokens_wait_for_the_minimum_also_those_outside_the_vocabulary(
    completion: list[int], held_back: bool
) -> None:
    logits = edited(completion=completion, min_tokens=2, stop_token_ids=(0, 99))
    assert logits == ([NEVER, *LOGITS.tolist()[1:]] if held_back else LOGITS.tolist())


def test_repetition_counts_prompt_and_completion() -> None:
    assert edited(prompt=[0], completion=[3, 3], repetition_penalty=4.0) == [0.5, 1.0, 0.0, -4.0, -3.0]


def test_frequency_and_presence_count_the_completion_alone() -> None:
    logits = edited(prompt=[0, 1], completion=[3, 3, 1], frequency_penalty=0.5, presence_penalty=0.25)
    assert logits == [2.0, 0.25, 0.0, -2.25, -3.0]


def test_penalties_come_after_biases_and_bans() -> None:
    logits = edited(prompt=[0], repetition_penalty=2.0, logit_bias=((0, 2.0),), bad_words=((1,),), completion=[1])
    assert logits == [2.0, NEVER, 0.0, -1.0, -3.0]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"logit_bias": ((5, 1.0),)},
        {"logit_bias": ((1, float("inf")),)},
        {"allowed_token_ids": (-1,)},
        {"bad_words": ((1, 5),)},
    ],
)
def test_what_cannot_be_done_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(max_tokens=8, **params).validate(vocab_size=5, eos_token_ids=frozenset())
