"""Drives the backend for one request: one engine request per choice, text and stop strings on top of its tokens.

    Choice --backend.generate--> [TokenOutput, ...] --TextStream--> Delta ... Delta (with a finish reason)

`sample` merges the deltas of all choices in the order in which they arrive. Closing it, or cancelling the task that
iterates it, cancels every choice in the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from prime_rl.inference.backend import (
    Backend,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    TokenOutput,
)
from prime_rl.inference.http import HttpError
from prime_rl.inference.metrics import RequestMetrics
from prime_rl.inference.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of one prompt. `text` is None where neither text nor stop strings were asked for."""

    index: int
    request: GenerationRequest
    text: TextStream | None
    keep_stop_token_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What arrived for one choice. The last delta of a choice has a finish reason.

    `stop_reason` is the stop string or stop token id that ended the choice; None for end-of-sequence.
    """

    index: int
    text: str
    tokens: list[TokenOutput]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Completion:
    """A whole choice, joined from its deltas."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append what arrived."""
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return self.tokens[0].prompt_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Samples choices from a backend and observes how long they take."""

    backend: Backend
    metrics: RequestMetrics

    async def complete(self, choices: Sequence[Choice]) -> list[Completion]:
        """All choices as a whole, in order."""
        completions = {choice.index: Completion() for choice in choices}
        async with aclosing(self.sample(choices)) as deltas:
            async for delta in deltas:
                completions[delta.index].add(delta)
        return [completions[choice.index] for choice in choices]

    async def sample(self, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
        """The deltas of all choices as they arrive."""
        if len(choices) == 1:
            source = self._sample_one(choices[0])
        else:
            source = _merge([self._sample_one(choice) for choice in choices])
        async with aclosing(source):
            async for delta in source:
                yield delta

    async def _sample_one(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        started = time.perf_counter()
        waits_for_first = choice.request.stream
        async with aclosing(self.backend.generate(choice.request)) as source:
            async for tokens in source:
                delta = self._delta(choice, tokens)
                if waits_for_first:
                    self.metrics.first_token(time.perf_counter() - started)
                    waits_for_first = False
                if delta.finish_reason is not None:
                    self.metrics.finished(delta.finish_reason, time.perf_counter() - started)
                    yield delta
                    return
                yield delta
        raise HttpError("the engine ended the request before it was complete", status=503)

    def _delta(self, choice: Choice, tokens: list[TokenOutput]) -> Delta:
        reason = tokens[-1].finish_reason if tokens else None
        if reason is FinishReason.ABORT:
            raise HttpError("the engine aborted the request", status=503)
        if choice.text is None:
            return Delta(
                index=choice.index,
                text="",
                tokens=tokens,
                finish_reason=reason,
                stop_reason=self._stop_token(choice, tokens),
            )
        return self._delta_with_text(choice, choice.text, tokens)

    def _delta_with_text(self, choice: Choice, stream: TextStream, tokens: list[TokenOutput]) -> Delta:
        pieces: list[str] = []
        for number, token in enumerate(tokens):
            if token.finish_reason is not FinishReason.STOP or choice.keep_stop_token_text:
                text, stop = stream.push(token.token_id)
                pieces.append(text)
            else:  # the token that ended the choice is not part of its text
                stop = None
            if stop is None and token.finish_reason is not None:
                text, stop = stream.finish()
                pieces.append(text)
            if stop is not None:
                return Delta(
                    index=choice.index,
                    text="".join(pieces),
                    tokens=tokens[: number + 1],
                    finish_reason=FinishReason.STOP,
                    stop_reason=stop,
                )
        return Delta(
            index=choice.index,
            text="".join(pieces),
            tokens=tokens,
            finish_reason=tokens[-1].finish_reason if tokens else None,
            stop_reason=self._stop_token(choice, tokens),
        )

    def _stop_token(self, choice: Choice, tokens: list[TokenOutput]) -> int | None:
        if not tokens or tokens[-1].finish_reason is not FinishReason.STOP:
            return None
        last = tokens[-1].token_id
        is_end_of_sequence = last in self.backend.eos_token_ids and not choice.request.sampling.ignore_eos
        return None if is_end_of_sequence else last


async def _merge(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The items of all sources as they arrive; the first failure ends them all."""
    queue: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(source: AsyncIterator[Delta]) -> None:
        async for item in source:
            queue.put_nowait(item)

    tasks = [asyncio.create_task(pump(source), name=f"choice {i}") for i, source in enumerate(sources)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            else:
                item.result()
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()
