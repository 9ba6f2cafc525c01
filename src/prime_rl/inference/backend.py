"""The seam between an inference engine and the HTTP server: token ids in, token ids out.

Text, chat templates and stop strings are the server's business. `engine.engine.Engine` and `fake.FakeBackend`
implement `Backend`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from prime_rl.errors import PrimeRLError

if TYPE_CHECKING:
    from torch import Tensor


class RequestError(PrimeRLError, ValueError):
    """A request can never be served: it is malformed, too long, or larger than the cache. Nothing was queued."""


class EngineFailed(PrimeRLError):
    """The engine stopped, by a failure or by `close`; requests in flight end with this, later ones begin with it."""


class FinishReason(StrEnum):
    """Why a request ended: a stop token, `max_tokens` or the model's length, or somebody ended it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


RankedLogprob = tuple[int, float, int]
"""A token, its logprob, and its rank among all tokens, from 1."""

PromptLogprobs = list[list[RankedLogprob] | None]
"""One entry per prompt token: the token itself, then the most likely; None for the first, which nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The distribution is made by bans, biases, penalties, temperature, top-k, min-p and top-p.

    Example: SamplingParams(max_tokens=128, temperature=0.7, top_p=0.95, seed=1)
    """

    max_tokens: int
    min_tokens: int = 0
    """Stop tokens and end of sequence cannot be drawn before this many tokens."""
    temperature: float = 1.0
    """0 takes the most likely token; its logprob is then that of the distribution at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """In [0.01, 100], so that no logit overflows."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be drawn; empty: all of them."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are never completed."""
    seed: int | None = None
    """None: a seed is drawn from the engine's."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_top_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    """Report the logprobs of the prompt, of this many most likely tokens beside its own; they are those of the model's
    own distribution (temperature 1). None: report none."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_history(self) -> bool:
        """Whether the next token's distribution depends on the tokens so far by more than the model."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a completion of a model with these end-of-sequence tokens."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | eos_token_ids

    def _token_ids(self) -> Iterator[int]:
        yield from (token_id for token_id, _ in self.logit_bias)
        yield from self.allowed_token_ids
        for word in self.bad_words:
            yield from word

    def validate(self, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Raise RequestError for a value outside its range, or where the model has no token left to draw."""
        checks = (
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (0 <= self.min_tokens <= self.max_tokens, f"min_tokens must be in [0, max_tokens], got {self.min_tokens}"),
            (_within(self.temperature, 0.0, 1e6), f"temperature must be at least 0, got {self.temperature}"),
            (_within(self.top_p, 0.0, 1.0) and self.top_p > 0, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.top_k >= -1, f"top_k must be -1 (off) or at least 0, got {self.top_k}"),
            (_within(self.min_p, 0.0, 1.0), f"min_p must be in [0, 1], got {self.min_p}"),
            (
                _within(self.repetition_penalty, 0.01, 100.0),
                f"repetition_penalty must be in [0.01, 100], got {self.repetition_penalty}",
            ),
            (self.num_top_logprobs >= 0, f"the number of top logprobs must not be negative: {self.num_top_logprobs}"),
            (
                _within(self.presence_penalty, -2.0, 2.0),
                f"presence_penalty must be in [-2, 2]: {self.presence_penalty}",
            ),
            (
                _within(self.frequency_penalty, -2.0, 2.0),
                f"frequency_penalty must be in [-2, 2]: {self.frequency_penalty}",
            ),
            (all(math.isfinite(bias) for _, bias in self.logit_bias), "logit_bias must be finite"),
            (all(0 <= i < vocab_size for i in self._token_ids()), f"token ids must be in [0, {vocab_size - 1}]"),
            ((self.num_prompt_logprobs or 0) >= 0, f"prompt_logprobs must not be negative: {self.num_prompt_logprobs}"),
        )
        for holds, message in checks:
            if not holds:
                raise RequestError(message)
        if self.min_tokens and self.stop_ids(eos_token_ids).issuperset(range(vocab_size)):
            raise RequestError(
                f"min_tokens = {self.min_tokens} cannot be reached: stop_token_ids and the end of sequence are the "
                "whole vocabulary, so there is no other token to draw; leave one out, or min_tokens"
            )


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion of one prompt. `request_id` is unique among the requests in flight."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    choice: int = 0
    """Which of the completions that were asked for at once; tells apart those without a seed."""
    stream: bool = True
    """False: one item with all tokens at the end. Cheaper by one wake-up of the event loop per token, so whoever needs
    neither tokens as they come nor stop strings should ask for it."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled token. (A msgspec struct: one is made per token, and it costs a tenth of a frozen dataclass.)

    `logprob` is under the distribution that was sampled from: after penalty, temperature, top-k, top-p and min-p.
    `version` is the weights version that produced it. Only the last token of a request has a `finish_reason`.
    """

    token_id: int
    logprob: float
    version: int
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """On the first token of a request that asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges now, and counters since the start (`_total`)."""

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    finished_total: int = 0
    aborted_total: int = 0
    steps_total: int = 0
    version: int = 0
    paused: bool = False
    error: str | None = None
    """Why the engine stopped; None while it works."""


class Backend(Protocol):
    """What the server needs of an engine. All methods are called on one event loop."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenOutput], None]:
        """Tokens as they come: each item is all that arrived since the last one.

        The first `__anext__` raises RequestError for a request that can never be served; any may raise EngineFailed, or
        RequestError when the request's own sampling turns out to leave nothing to draw.
        A completion that reaches `max_model_len` (prompt included) ends there with reason "length". Closing the
        iterator, or cancelling the task that waits on it, ends the request and frees its blocks.
        """
        ...

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError now for a request that `generate` would refuse, without queueing it."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters in use, not copies, under their Hugging Face names. Only `update_weights` may write them."""
        ...

    async def update_weights(self, swap: Callable[[], None], version: int, *, recompute: bool = False) -> None:
        """Run `swap`, which writes into `weights()`, between two steps; from the next token on `version` samples.

        Running requests keep going, with the keys and values that they have or, with `recompute`, with new ones of all
        their tokens. What older weights computed is shared with nobody any more. `swap` runs on the engine's thread;
        what it raises ends the engine (EngineFailed here and for all requests), so that nothing half-written serves.
        """
        ...

    async def pause(self) -> None:
        """Finish the current step and generate nothing until `resume`; nothing is dropped."""
        ...

    async def resume(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop; requests in flight end with an error."""
        ...
