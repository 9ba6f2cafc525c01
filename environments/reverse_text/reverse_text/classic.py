"""The classic verifiers form: `load_environment()` gives a `SingleTurnEnv` with a rubric."""

from __future__ import annotations

import verifiers.legacy as vf
from datasets import Dataset

from reverse_text.reward import answer_of, lcs_ratio
from reverse_text.texts import SYSTEM_PROMPT, Split, make_texts, messages_for


def reverse_text_reward(completion: vf.Messages, answer: str) -> float:
    """LCS ratio of the last assistant message to the reversed text."""
    content = completion[-1].content if completion else ""
    return lcs_ratio(answer_of(content if isinstance(content, str) else ""), answer)


def load_environment(
    num_examples: int = 1000,
    num_eval_examples: int = 100,
    min_words: int = 3,
    max_words: int = 8,
    max_chars: int | None = None,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
) -> vf.Environment:
    """Texts of the train split, and of the eval split for evaluation."""

    def build(split: Split, num: int) -> Dataset:
        texts = make_texts(split, num, min_words=min_words, max_words=max_words, max_chars=max_chars, seed=seed)
        return Dataset.from_list(
            [{"prompt": messages_for(text, system_prompt), "answer": text[::-1]} for text in texts]
        )

    return vf.SingleTurnEnv(
        dataset=lambda: build("train", num_examples),
        eval_dataset=lambda: build("eval", num_eval_examples),
        rubric=vf.Rubric(funcs=[reverse_text_reward]),
    )
