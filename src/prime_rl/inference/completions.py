"""POST /v1/completions: prompts as text or token ids in, text out, as the OpenAI API and vLLM spell it."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.backend import PromptLogprobs
from prime_rl.inference.generation import Choice, Completion, Delta
from prime_rl.inference.http import HttpError, read_json
from prime_rl.inference.logprobs import completion_logprobs, prompt_logprobs, prompt_tokens, sampled_tokens
from prime_rl.inference.requests import (
    COMPLETION_MAX_TOKENS,
    CompletionRequest,
    checked_prompt,
    fitting_max_tokens,
    num_choices,
    parse,
)
from prime_rl.inference.service import Json, Service


async def completions(request: Request) -> Response:
    """Answer one request: choice `p * n + i` is completion i of prompt p."""
    service: Service = request.app.state.service
    body = parse(await read_json(request), CompletionRequest)
    service.check_model(body.model)
    if body.max_tokens == 0 and not body.echo:
        raise HttpError("max_tokens must be at least 1 without echo", param="max_tokens")
    prompts = await _prompts(service, body)
    scores = body.prompt_logprobs
    if scores is None and body.echo:
        scores = body.logprobs
    n = num_choices(body, len(prompts))
    choices: list[Choice] = []
    for number, prompt_ids in enumerate(prompts):
        room = service.limits.max_model_len - len(prompt_ids)
        default = min(COMPLETION_MAX_TOKENS, room)
        choices += service.choices(
            prompt_ids,
            body,
            range(number * n, number * n + n),
            max_tokens=fitting_max_tokens(_max_tokens(body, default), prompt_ids, service.limits),
            num_top_logprobs=body.logprobs or 0,
            num_prompt_logprobs=scores,
            with_text=True,
            stream=bool(body.stream),
        )
    return await service.respond(
        request,
        CompletionShape(service=service, body=body, prompts=prompts, num_choices=n),
        choices,
        num_prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        options=body.stream_options,
    )


def _max_tokens(body: CompletionRequest, default: int) -> int:
    """Tokens to sample. None at all cannot be asked of the engine: one is sampled and not shown."""
    return default if body.max_tokens is None else max(body.max_tokens, 1)


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompt = body.prompt
    if not prompt:
        raise HttpError("the prompt is empty", param="prompt")
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompts = cast(list[str | list[int]], [prompt])
    else:
        prompts = cast(list[str | list[int]], prompt)
    num_choices(body, len(prompts))
    encode = partial(service.tokenizer.encode_aside, add_special_tokens=body.add_special_tokens)
    return [
        checked_prompt(await encode(one) if isinstance(one, str) else one, service.limits, param="prompt")
        for one in prompts
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """`text_completion` objects. `offsets` counts the characters sent of each choice of a stream."""

    service: Service
    body: CompletionRequest
    prompts: list[list[int]]
    num_choices: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, completions: Sequence[Completion]) -> Json:
        # The first completion of a prompt has scored it for all of them.
        scores = [completions[index - index % self.num_choices].prompt_logprobs for index in range(len(completions))]
        return self._envelope(
            [self._choice(index, part.text, part, scores[index]) for index, part in enumerate(completions)]
        )

    def opening(self) -> list[Json]:
        return []

    def chunk(self, delta: Delta) -> Json:
        return self._envelope([self._choice(delta.index, delta.text, delta)])

    def closing(self) -> Json:
        return self._envelope([])

    def _choice(self, index: int, text: str, part: Completion | Delta, scores: PromptLogprobs | None = None) -> Json:
        body = self.body
        is_first = index not in self.offsets
        offset = self.offsets.setdefault(index, 0)
        shown = [] if body.max_tokens == 0 else part.tokens
        text = "" if body.max_tokens == 0 else text
        if body.echo and is_first:
            text = self._prompt_text(index // self.num_choices) + text
        self.offsets[index] += len(text)
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if scores is not None and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self.service.tokenizer)
        if body.logprobs is not None:
            echoed = prompt_tokens(self.prompts[index // self.num_choices], scores) if body.echo and scores else []
            choice["logprobs"] = completion_logprobs(
                echoed + sampled_tokens(shown),
                self.service.tokenizer,
                num_top=body.logprobs,
                as_ids=bool(body.return_tokens_as_token_ids),
                text_offset=offset,
            )
        if body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in shown]
            if is_first:
                choice["prompt_token_ids"] = self.prompts[index // self.num_choices]
        return choice

    def _prompt_text(self, number: int) -> str:
        prompt = self.body.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[number]
        ids = self.prompts[number]
        return prompt if isinstance(prompt, str) else self.service.tokenizer.decode(ids, skip_special_tokens=False)

    def _envelope(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
