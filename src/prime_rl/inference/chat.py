"""POST /v1/chat/completions: messages in, text out, as the OpenAI API and vLLM spell it.

Tools are handed to the chat template. What the model writes is told apart (`replies`) where the server was told how the
model writes; else it comes back as plain text, tool calls included.
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
from prime_rl.inference.messages import template_messages, template_tools
from prime_rl.inference.replies import Piece, ReplyParser
from prime_rl.inference.requests import (
    ChatRequest,
    TokenizeRequest,
    calls_tools,
    checked_prompt,
    fitting_max_tokens,
    num_choices,
    parse,
)
from prime_rl.inference.service import Json, Service
from prime_rl.inference.tokenizer import ChatTemplateError

PROMPT_END = 8
"""Tokens of a prompt in which a tag that opens the model's reasoning is looked for: the tag and line breaks."""


async def chat_completions(request: Request) -> Response:
    """Answer one request."""
    service: Service = request.app.state.service
    body = parse(await read_json(request), ChatRequest)
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise HttpError("top_logprobs needs logprobs=true", param="top_logprobs")
    prompt_ids = checked_prompt(await render(service, body), service.limits, param="messages")
    asked = body.max_completion_tokens or body.max_tokens
    room = service.limits.max_model_len - len(prompt_ids)
    parsers = [_parser(service, body, prompt_ids) for _ in range(num_choices(body))]
    choices = service.choices(
        prompt_ids,
        # Tags may be special tokens.
        body if parsers[0] is None else body.model_copy(update={"skip_special_tokens": False}),
        range(len(parsers)),
        max_tokens=fitting_max_tokens(asked, prompt_ids, service.limits) if asked else room,
        num_top_logprobs=body.top_logprobs or 0,
        num_prompt_logprobs=body.prompt_logprobs,
        with_text=True,
        stream=bool(body.stream),
    )
    return await service.respond(
        request,
        ChatShape(service=service, body=body, prompt_ids=prompt_ids, parsers=parsers),
        choices,
        num_prompt_tokens=len(prompt_ids),
        stream=bool(body.stream),
        options=body.stream_options,
    )


async def render(service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The token ids of a conversation."""
    arguments = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    arguments["continue_final_message"] = body.continue_final_message
    arguments["add_generation_prompt"] = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    try:
        messages, tools = template_messages(body.messages or []), template_tools(body.tools or [])
        prompt = service.tokenizer.render_chat(messages, tools, arguments)
    except ChatTemplateError as error:
        raise HttpError(str(error), param="messages") from error
    return await service.tokenizer.encode_aside(prompt, add_special_tokens=False)


def _parser(service: Service, body: ChatRequest, prompt_ids: list[int]) -> ReplyParser | None:
    prompt_end = service.tokenizer.decode(prompt_ids[-PROMPT_END:], skip_special_tokens=False)
    return service.replies.parser(has_tools=calls_tools(body), prompt_end=prompt_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """`chat.completion` and `chat.completion.chunk` objects; one parser for each choice."""

    service: Service
    body: ChatRequest
    prompt_ids: list[int]
    parsers: list[ReplyParser | None]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> Json:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        scores = prompt_logprobs(completions[0].prompt_logprobs, self.service.tokenizer)
        return self._envelope("chat.completion", choices) | self._prompt() | {"prompt_logprobs": scores}

    def opening(self) -> list[Json]:
        return [
            self._envelope(
                "chat.completion.chunk",
                [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            )
            | (self._prompt() if index == 0 else {})
            for index in range(len(self.parsers))
        ]

    def chunk(self, delta: Delta) -> Json | None:
        said: Json = {"content": delta.text}
        if parser := self.parsers[delta.index]:
            num_before = parser.num_calls
            piece = parser.push(delta.text)
            if delta.finish_reason is not None:
                piece += parser.finish()
            said = self._said(piece, num_before)
            if not (said or delta.finish_reason or self.body.logprobs or self.body.return_token_ids):
                return None
        choice = {"index": delta.index, "delta": said} | self._rest(delta.index, delta)
        return self._envelope("chat.completion.chunk", [choice])

    def closing(self) -> Json:
        return self._envelope("chat.completion.chunk", [])

    def _choice(self, index: int, completion: Completion) -> Json:
        message: Json = {"role": "assistant", "content": completion.text}
        if parser := self.parsers[index]:
            said = self._said(parser.push(completion.text) + parser.finish())
            message = {"role": "assistant", "content": None if said else ""} | said
        return {"index": index, "message": message} | self._rest(index, completion)

    def _said(self, piece: Piece, num_before: int | None = None) -> Json:
        """Fields of a message, or of a delta after `num_before` calls."""
        calls = [
            ({} if num_before is None else {"index": index})
            | {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for index, call in enumerate(piece.calls, num_before or 0)
            if index == 0 or self.body.parallel_tool_calls is not False
        ]
        said = {"reasoning": piece.reasoning, "content": piece.content, "tool_calls": calls}
        return {name: value for name, value in said.items() if value}

    def _rest(self, index: int, part: Completion | Delta) -> Json:
        body, parser, reason = self.body, self.parsers[index], part.finish_reason
        rest: Json = {
            "logprobs": None,
            "finish_reason": "tool_calls" if parser and parser.num_calls and reason == "stop" else reason,
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
