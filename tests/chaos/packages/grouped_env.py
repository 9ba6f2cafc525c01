"""reverse-text of verifiers' classic API, scored by group: a rollout's reward is its place among those of its group.

The rewards of a whole group of n are 0, 1 / (n - 1), ... 1, each once, whatever was said: so they tell whether it was
scored at once, and as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import verifiers.legacy as vf

from reverse_text.classic import load_environment as load_plain
from reverse_text.reward import lcs_ratio


def place(completions: Sequence[vf.Messages], answers: Sequence[str]) -> list[float]:
    """By how much of the answer was said; of equals the first is behind."""
    pairs = zip(completions, answers, strict=True)
    said = [lcs_ratio(str(completion[-1].content or ""), answer) for completion, answer in pairs]
    order = sorted(range(len(said)), key=lambda index: (said[index], index))
    return [order.index(index) / max(1, len(said) - 1) for index in range(len(said))]


def load_environment(**args: Any) -> vf.Environment:
    """`args`: those of reverse-text."""
    plain = load_plain(**args)
    return vf.SingleTurnEnv(
        dataset=plain.get_dataset(), eval_dataset=plain.get_eval_dataset(), rubric=vf.Rubric(funcs=[place])
    )
