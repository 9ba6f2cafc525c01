"""Which weights sampled which tokens of an answer: exact, and nothing is done per token.

A choice of an answer is a request to vLLM's engine. Its tokens are counted only when weights change: the engine is
paused then and everything that it sampled has been counted, so the tokens that a request has are those of the older
weights, and later ones are of the newer.

    generate() --begin--> Choices --(an update)--cut--> Choices --(the end)--runs--> "versions" of the answer
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from prime_rl.transport.api import VersionRuns


@dataclass(slots=True)
class Choice:
    """One request to the engine. `starts[i]`: from token `starts[i][0]` on, weights `starts[i][1]`."""

    request_id: str
    starts: list[tuple[int, int]]
    num_tokens: int = 0
    """Of the finished request."""

    def cut(self, num_tokens: int, version: int) -> None:
        """What comes after the first `num_tokens` tokens is sampled with weights `version`."""
        if self.starts[-1][0] == num_tokens:
            self.starts.pop()
        if not self.starts or self.starts[-1][1] != version:
            self.starts.append((num_tokens, version))

    def runs(self) -> VersionRuns:
        """`(version, number of tokens)`, in order; the numbers sum to `num_tokens`."""
        ends = [start for start, _ in self.starts[1:]] + [self.num_tokens]
        lengths = [
            (version, min(end, self.num_tokens) - start)
            for (start, version), end in zip(self.starts, ends, strict=True)
        ]
        return [(version, length) for version, length in lengths if length > 0]


@dataclass(slots=True, eq=False)
class Prompt:
    """The choices of one prompt of an answer."""

    num_choices: int
    adapter_version: int | None
    """The version of the adapter that the request keeps to its end; None: it goes on with whatever is served."""
    choices: dict[int, Choice] = field(default_factory=dict)

    def begin(self, index: int, request_id: str, version: int) -> None:
        """Choice `index` is given to the engine now, under this id, while weights `version` are served."""
        started = version if self.adapter_version is None else self.adapter_version
        self.choices[index] = Choice(request_id, [(0, started)])

    def cut(self, count: Callable[[str], int | None], version: int) -> None:
        """New full weights are served from now on. `count` tells how many tokens a request in flight has."""
        if self.adapter_version is not None:
            return
        for choice in self.choices.values():
            num_tokens = count(choice.request_id)
            if num_tokens is not None:
                choice.cut(num_tokens, version)

    def runs(self) -> list[VersionRuns]:
        """For each choice, in order; nothing sampled is an empty list."""
        return [self.choices[index].runs() if index in self.choices else [] for index in range(self.num_choices)]


class Answer:
    """The prompts of one HTTP answer, in the order in which they were given to the engine."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    def runs(self) -> list[VersionRuns]:
        """For each choice of the answer."""
        return [runs for prompt in self.prompts for runs in prompt.runs()]


ANSWER: ContextVar[Answer | None] = ContextVar("prime_rl_answer", default=None)
"""The answer that is being made, where it says its versions; set per HTTP request."""

PROMPT: ContextVar[Prompt | None] = ContextVar("prime_rl_prompt", default=None)
"""The prompt that is being given to the engine."""


def cut_all(prompts: Iterable[Prompt], count: Callable[[str], int | None], version: int) -> None:
    """Note for every prompt in flight what it has, at an update to full weights `version`."""
    for prompt in prompts:
        prompt.cut(count, version)
