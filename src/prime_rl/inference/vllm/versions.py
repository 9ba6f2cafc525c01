"""Which weights sampled which tokens of an answer: exact, and nothing is done per token.

A choice of an answer is a request to vLLM's engine. Its tokens are counted only when weights change: the engine is
paused then and everything that it sampled has been counted, so the tokens that a request has are those of the older
weights, and later ones are of the newer.

    _add_request --begin--> Choices --(an update)--cut--> Choices --(the end)--runs--> "versions" of the answer

A request with an adapter has one version, the adapter's: it keeps it to its end, and full weights, which would change
what it samples, end it.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prime_rl.transport.api import VersionRuns


@dataclass(slots=True)
class Choice:
    """One request to the engine. `starts[i]`: from token `starts[i][0]` on, weights `starts[i][1]`."""

    request_id: str
    starts: list[tuple[int, int]]
    has_adapter: bool = False
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
    choices: dict[int, Choice] = field(default_factory=dict)
    is_dropped: bool = False
    """A choice of it was ended by new weights; there is no answer."""

    def runs(self) -> list[VersionRuns]:
        """For each choice, in order; nothing sampled is an empty list."""
        return [self.choices[index].runs() if index in self.choices else [] for index in range(self.num_choices)]


class Answer:
    """The prompts of one HTTP answer, in the order in which they were given to the engine."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    @property
    def is_dropped(self) -> bool:
        """New weights ended a part of it."""
        return any(prompt.is_dropped for prompt in self.prompts)

    def runs(self) -> list[VersionRuns]:
        """For each choice of the answer."""
        return [runs for prompt in self.prompts for runs in prompt.runs()]


ANSWER: ContextVar[Answer | None] = ContextVar("prime_rl_answer", default=None)
"""The answer that is being made, where it says its versions; set per HTTP request."""

PROMPT: ContextVar[Prompt | None] = ContextVar("prime_rl_prompt", default=None)
"""The prompt that is being given to the engine."""


class Versions:
    """What samples now: full weights `base`, and an adapter on top of them where there is one."""

    def __init__(self) -> None:
        self.base = 0
        """The full weights; an adapter changes nothing about them."""
        self.adapter: Any = None
        """vLLM's LoRARequest, which requests are given that name no adapter of their own."""
        self.in_flight: set[Prompt] = set()
        """Prompts whose versions are asked for."""
        self._adapter_version = 0

    def begin(self, request: Any, prompt: Prompt | None, index: int) -> None:
        """`request`, vLLM's, is given to the engine now, as choice `index` of `prompt`: it gets the adapter and, in the
        same moment, the version that say the same."""
        version = self.base
        if request.lora_request is None and self.adapter is not None and request.sampling_params is not None:
            request.lora_request, version = self.adapter, self._adapter_version
        if prompt is not None:
            prompt.choices[index] = Choice(request.request_id, [(0, version)], request.lora_request is not None)

    def use_adapter(self, adapter: Any, version: int) -> None:
        """Requests that begin from now on are given `adapter`; None: none. Those in flight keep what they have."""
        self.adapter, self._adapter_version = adapter, version

    def drop(self, request_ids: Collection[str]) -> None:
        """These requests are ended; what they belong to gets no answer."""
        for prompt in self.in_flight:
            if any(choice.request_id in request_ids for choice in prompt.choices.values()):
                prompt.is_dropped = True

    def use_weights(self, version: int, count: Callable[[str], int | None]) -> None:
        """New full weights sample from now on. `count` tells how many tokens a request in flight has."""
        self.base, self.adapter = version, None
        for prompt in self.in_flight:
            for choice in prompt.choices.values():
                num_tokens = None if choice.has_adapter else count(choice.request_id)
                if num_tokens is not None:
                    choice.cut(num_tokens, version)
