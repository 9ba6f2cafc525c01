"""What the routes share: the backend, the tokenizer and the model's name, and how an answer is made.

    route: parse -> prompt ids -> Choice ... -> respond(shape) -> one JSON document, or a stream of chunks

A `Shape` knows how one route spells its answer; `respond` knows everything else, the same for all routes.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.admin import Administration
from prime_rl.inference.backend import Backend, GenerationRequest, TokenOutput
from prime_rl.inference.generation import Choice, Completion, Delta, Generator
from prime_rl.inference.http import EventStream, HttpError, json_response, until_disconnect
from prime_rl.inference.metrics import BackendCollector, RequestMetrics
from prime_rl.inference.replies import ReplyFormat
from prime_rl.inference.requests import Limits, bad_word_tokens, sampling_params, stop_strings
from prime_rl.inference.text import Stops, TextStream
from prime_rl.inference.tokenizer import TextTokenizer
from prime_rl.transport.api import SamplingFields, StreamOptions, VersionRuns

Json = dict[str, Any]


class Shape(Protocol):
    """How a route spells its answer."""

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The answer in one document, without usage and versions."""
        ...

    def opening(self) -> list[Json]:
        """Chunks to send before the first token."""
        ...

    def chunk(self, delta: Delta) -> Json | None:
        """One chunk of a stream; None where there is nothing to say yet."""
        ...

    def closing(self) -> Json:
        """The chunk without choices that carries the usage at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model."""

    backend: Backend
    tokenizer: TextTokenizer
    model_name: str
    model_root: str
    registry: CollectorRegistry
    generator: Generator
    administration: Administration
    replies: ReplyFormat
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def build(
        cls,
        backend: Backend,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        model_root: str,
        administration: Administration,
        replies: ReplyFormat | None = None,
    ) -> "Service":
        """A service with its own registry of metrics."""
        registry = CollectorRegistry()
        registry.register(BackendCollector(backend, model_name))
        generator = Generator(backend=backend, metrics=RequestMetrics(registry, model_name))
        return cls(
            backend=backend,
            tokenizer=tokenizer,
            model_name=model_name,
            model_root=model_root,
            registry=registry,
            generator=generator,
            administration=administration,
            replies=replies or ReplyFormat(),
        )

    @property
    def limits(self) -> Limits:
        return Limits(max_model_len=self.backend.max_model_len, vocab_size=self.backend.vocab_size)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model. A request that names none is for this one."""
        if name is not None and name != self.model_name:
            raise HttpError(
                f"the model {name!r} does not exist; this server serves {self.model_name!r}", status=404, param="model"
            )

    def choices(
        self,
        prompt_ids: list[int],
        fields: SamplingFields,
        indices: range,
        *,
        max_tokens: int,
        num_top_logprobs: int,
        num_prompt_logprobs: int | None,
        with_text: bool,
        stream: bool,
    ) -> list[Choice]:
        """One choice for each index, all of the same prompt; each is known to be one that the engine can serve."""
        if stream and num_prompt_logprobs is not None:
            raise HttpError("logprobs of the prompt are not available in a stream", param="prompt_logprobs")
        bad_words = bad_word_tokens(fields, partial(self.tokenizer.encode, add_special_tokens=False))
        stops = Stops(strings=stop_strings(fields), include=bool(fields.include_stop_str_in_output))
        made = []
        for number, index in enumerate(indices):
            sampling = sampling_params(
                fields,
                max_tokens=max_tokens,
                num_top_logprobs=num_top_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                bad_words=bad_words,
                choice=number,
                limits=self.limits,
            )
            text = None
            if with_text or stops.strings:
                text = TextStream(
                    self.tokenizer,
                    prompt_ids=prompt_ids,
                    stops=stops,
                    skip_special_tokens=fields.skip_special_tokens is not False,
                    min_tokens=sampling.min_tokens,
                )
            request = GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt_ids=prompt_ids,
                sampling=sampling,
                choice=number,
                stream=stream or bool(stops.strings),
            )
            self.backend.check(request)
            made.append(Choice(index=index, request=request, text=text, keep_stop_token_text=stops.include))
        return made

    async def respond(
        self,
        request: Request,
        shape: Shape,
        choices: list[Choice],
        *,
        num_prompt_tokens: int,
        stream: bool,
        options: StreamOptions | None,
    ) -> Response:
        """The answer to a request for `choices`; a client that goes away cancels them."""
        if options is not None and not stream:
            raise HttpError("stream_options can only be set with stream=true", param="stream_options")
        if stream:
            return EventStream(self._events(shape, choices, num_prompt_tokens, options or StreamOptions()))
        completions = await until_disconnect(request.receive, self.generator.complete(choices))
        num_sampled = sum(len(completion.tokens) for completion in completions)
        return json_response(
            shape.whole(completions)
            | {"usage": usage(num_prompt_tokens, num_sampled)}
            | {"versions": [version_runs(completion.tokens) for completion in completions]}
        )

    async def _events(
        self, shape: Shape, choices: list[Choice], num_prompt_tokens: int, options: StreamOptions
    ) -> AsyncGenerator[Json, None]:
        num_sampled = 0
        for opening in shape.opening():
            yield opening
        async with aclosing(self.generator.sample(choices)) as deltas:
            async for delta in deltas:
                num_sampled += len(delta.tokens)
                chunk = shape.chunk(delta)
                if chunk is None:
                    continue
                if options.continuous_usage_stats:
                    chunk["usage"] = usage(num_prompt_tokens, num_sampled)
                yield chunk
        if options.include_usage:
            yield shape.closing() | {"usage": usage(num_prompt_tokens, num_sampled)}


def version_runs(tokens: Sequence[TokenOutput]) -> VersionRuns:
    """Which weights sampled the tokens of one choice, in order."""
    return [(version, len(list(run))) for version, run in groupby(token.version for token in tokens)]


def usage(num_prompt_tokens: int, num_sampled: int) -> dict[str, int]:
    """Token counts in the OpenAI API's form."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }
