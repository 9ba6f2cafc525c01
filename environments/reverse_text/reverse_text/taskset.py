"""The v1 verifiers form: a taskset whose tasks score themselves. Works with verifiers 0.3.1 and later."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from reverse_text.reward import answer_of, lcs_ratio
from reverse_text.texts import SYSTEM_PROMPT, Split, make_texts


class ReverseTextConfig(vf.TasksetConfig):
    """Which texts; the arguments of the classic form, and the split."""

    split: Split = "train"
    num_examples: int = 1000
    min_words: int = 3
    max_words: int = 8
    max_chars: int | None = None
    seed: int = 0
    instruction: str = SYSTEM_PROMPT


class ReverseTextData(vf.TaskData):
    """A text to reverse (`prompt`) and its reversal."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Reverse one text."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def reverse_text_reward(self, trace: vf.Trace) -> float:
        """LCS ratio of the last reply to the reversed text."""
        return lcs_ratio(answer_of(trace.last_reply), self.data.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """The texts of one split."""

    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        texts = make_texts(
            config.split,
            config.num_examples,
            min_words=config.min_words,
            max_words=config.max_words,
            max_chars=config.max_chars,
            seed=config.seed,
        )
        for index, text in enumerate(texts):
            data = ReverseTextData(idx=index, prompt=text, system_prompt=config.instruction or None, answer=text[::-1])
            yield ReverseTextTask(data, config.task)
