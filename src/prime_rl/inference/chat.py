"""POST /v1/chat/completions: messages in, text out, as the OpenAI API and vLLM spell it.

Tools are handed to the chat template; what the model writes comes back as plain text, tool calls included.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.generation import Completion, Delta
from prime_rl.inference.http import HttpError, read_json
from prime_rl.inference.logprobs import chat_logprobs, prompt_logprobs
from prime_rl.inference.messages import template_messages
from prime_rl.inference.requests import (
    ChatRequest,
    TokenizeRequest,
    checked_prompt,
    fitting_max_tokens,
    num_choices,
    parse,
)
from prime_rl.inference.service import Json, Service
from prime_rl.inference.tokenizer import ChatTemplateError


async def chat_completions(request: Request) -> Response:
    """Answer one request."""
    service: Service = request.app.state.service
    body = parse(await read_json(request), ChatRequest)
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise HttpError("top_logprobs needs logprobs=true", param="top_logprobs")
    prompt_ids = checked_prompt(render(service, body), service.limits, param="messages")
    asked = body.max_completion_tokens or body.max_tokens
    room = service.limits.max_model_len - len(prompt_ids)
    choices = service.choices(
        prompt_ids,
        body,
        range(num_choices(body)),
        max_tokens=fitting_max_tokens(asked, prompt_ids, service.limits) if asked else room,
        num_top_logprobs=body.top_logprobs or 0,
        num_prompt_logprobs=body.prompt_logprobs,
        with_text=True,
        stream=bool(body.stream),
    )
    return await service.respond(
        request,
        ChatShape(service=service, body=body, prompt_ids=prompt_ids, num_choices=len(choices)),
        choices,
        num_prompt_tokens=len(prompt_ids),
        stream=bool(body.stream),
        options=body.stream_options,
    )


def render(service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The prompt of a conversation."""
    arguments = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    arguments["continue_final_message"] = body.continue_final_message
    arguments["add_generation_prompt"] = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    try:
        return service.tokenizer.render_chat(template_messages(body.messages or []), body.tools, arguments)
    except ChatTemplateError as error:
        raise HttpError(str(error), param="messages") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """`chat.completion` and `chat.completion.chunk` objects."""

    service: Service
    body: ChatRequest
    prompt_ids: list[int]
    num_choices: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> Json:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": completion.text}} | self._rest(completion)
            for index, completion in enumerate(completions)
        ]
        scores = prompt_logprobs(completions[0].prompt_logprobs, self.service.tokenizer)
        return self._envelope("chat.completion", choices) | self._prompt() | {"prompt_logprobs": scores}

    def opening(self) -> list[Json]:
        return [
            self._envelope(
                "chat.completion.chunk",
                [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            )
            | (self._prompt() if index == 0 else {})
            for index in range(self.num_choices)
        ]

    def chunk(self, delta: Delta) -> Json:
        choice = {"index": delta.index, "delta": {"content": delta.text}} | self._rest(delta)
        return self._envelope("chat.completion.chunk", [choice])

    def closing(self) -> Json:
        return self._envelope("chat.completion.chunk", [])

    def _rest(self, part: Completion | Delta) -> Json:
        body = self.body
        rest: Json = {
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.logprobs:
            rest["logprobs"] = chat_logprobs(
                part.tokens,
                self.service.tokenizer,
                num_top=body.top_logprobs or 0,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
        if body.return_token_ids:
            rest["token_ids"] = [token.token_id for token in part.tokens]
        return rest

    def _prompt(self) -> Json:
        return {"prompt_token_ids": self.prompt_ids} if self.body.return_token_ids else {}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
