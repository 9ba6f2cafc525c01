"""What clients may ask for: the OpenAI-shaped requests, and how they become requests of the engine.

Everything that can be wrong with a request is found here, before the engine sees it, and becomes a `HttpError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from prime_rl.inference.backend import SamplingParams
from prime_rl.inference.http import HttpError
from prime_rl.transport.api import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    NEUTRAL_VALUES,
    GenerateSampling,
    Message,
    SamplingFields,
    StreamOptions,
    TokenIds,
)

COMPLETION_MAX_TOKENS = 16
"""Default of `max_tokens` of /v1/completions, as in the OpenAI API."""

GREEDY_BELOW = 1e-5
"""Temperatures below this one are taken as 0, as vLLM does; dividing logits by them would overflow."""

MAX_BIAS = 100.0
"""Largest amount of a logit bias, as in the OpenAI API."""

UNION_TYPES = frozenset({"str", "int"})
"""Types in the unions of the request fields, beside lists."""

Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts = Annotated[list[TokenIds], Field(fail_fast=True)]
Body = TypeVar("Body", bound=Message)


class StreamingFields(SamplingFields):
    """What chat and completions have in common beside sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatRequest(StreamingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """Whether a reply may have several calls; only its first one is told otherwise."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def calls_tools(body: ChatRequest) -> bool:
    """Whether the reply's tool calls are to be read; HttpError for a choice that needs constrained sampling."""
    if body.tool_choice in (None, "none"):
        return body.tool_choice is None and bool(body.tools)
    if not body.tools:
        raise HttpError("tool_choice needs tools", param="tool_choice")
    if body.tool_choice != "auto":
        raise HttpError(
            f"tool_choice={body.tool_choice!r:.80} is not supported by this server, which samples freely; take 'auto' "
            "or 'none', or serve with backend = 'vllm'",
            param="tool_choice",
        )
    return True


class CompletionRequest(StreamingFields):
    """POST /v1/completions."""

    prompt: str | Texts | TokenIds | Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 with `echo`: nothing but the prompt and its logprobs."""

    echo: bool | None = None
    """Let the text, and the logprobs where they were asked for, begin with the prompt."""

    add_special_tokens: bool = True


class TokenizeRequest(Message):
    """POST /tokenize: a prompt, or messages rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served model can take."""

    max_model_len: int
    vocab_size: int


def parse(body: Any, kind: type[Body]) -> Body:
    """`body` as a request of `kind`; HttpError names the first wrong field."""
    if not isinstance(body, Mapping):
        raise HttpError("the request body must be a JSON object")
    _refuse_unsupported(body, kind)
    if isinstance(sampling := body.get("sampling_params"), Mapping):
        _refuse_unsupported(sampling, GenerateSampling)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        field = _field(problems[0]["loc"])
        # A field of several types has one problem for each of them.
        reasons = dict.fromkeys(problem["msg"] for problem in problems if _field(problem["loc"]) == field)
        raise HttpError(f"{field}: {' or '.join(reasons)}", param=field) from error


def checked_prompt(prompt_ids: Sequence[int], limits: Limits, *, param: str) -> list[int]:
    """The prompt, if the engine can take it and sample one token."""
    if not prompt_ids:
        raise HttpError("the prompt is empty; it must have at least one token", param=param)
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        raise HttpError(f"token ids of the prompt must be in the vocabulary, 0 to {limits.vocab_size - 1}", param=param)
    if len(prompt_ids) >= limits.max_model_len:
        raise HttpError(
            f"This model's maximum context length is {limits.max_model_len} tokens, prompt and completion together. "
            f"Your prompt has {len(prompt_ids)} tokens, which leaves none to generate. Shorten the prompt.",
            param=param,
        )
    return list(prompt_ids)


def fitting_max_tokens(asked: int, prompt_ids: Sequence[int], limits: Limits) -> int:
    """`asked`, if so many tokens fit behind the prompt."""
    if len(prompt_ids) + asked > limits.max_model_len:
        raise HttpError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested {asked} "
            f"output tokens and your prompt has {len(prompt_ids)} tokens. Reduce one of them.",
            param="max_tokens",
        )
    return asked


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    num_top_logprobs: int,
    num_prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    choice: int,
    limits: Limits,
) -> SamplingParams:
    """The engine's sampling parameters of choice number `choice` of a prompt; the first one scores the prompt."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise HttpError(f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens})", param="min_tokens")
    temperature = _given(fields.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_given(fields.top_p, 1.0),
        top_k=fields.top_k or -1,
        min_p=_given(fields.min_p, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        seed=None if fields.seed is None else fields.seed + choice,
        stop_token_ids=_known(fields.stop_token_ids or (), limits, "stop_token_ids"),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields, limits),
        allowed_token_ids=_known(fields.allowed_token_ids or (), limits, "allowed_token_ids"),
        bad_words=bad_words,
        ignore_eos=bool(fields.ignore_eos),
        num_top_logprobs=num_top_logprobs,
        num_prompt_logprobs=num_prompt_logprobs if choice == 0 else None,
    )


def _known(token_ids: Sequence[int], limits: Limits, param: str) -> tuple[int, ...]:
    if not all(0 <= token_id < limits.vocab_size for token_id in token_ids):
        raise HttpError(f"{param} must be in the vocabulary, 0 to {limits.vocab_size - 1}", param=param)
    return tuple(token_ids)


def _logit_bias(fields: SamplingFields, limits: Limits) -> tuple[tuple[int, float], ...]:
    biases = fields.logit_bias or {}
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in biases):
        raise HttpError("logit_bias must be an object of token ids and numbers", param="logit_bias")
    ids = _known([int(name) for name in biases], limits, "logit_bias")
    return tuple(zip(ids, (max(-MAX_BIAS, min(MAX_BIAS, value)) for value in biases.values()), strict=True))


def bad_word_tokens(fields: SamplingFields, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each bad word, at the beginning of a text and, where it is as long, after a space."""
    words: list[tuple[int, ...]] = []
    for word in fields.bad_words or ():
        first = tuple(encode(word.lstrip()))
        if not first:
            raise HttpError("bad_words cannot contain an empty string", param="bad_words")
        spaced = tuple(encode(f" {word.lstrip()}"))
        words += [first, spaced] if spaced[0] != first[0] and len(spaced) == len(first) else [first]
    return tuple(words)


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """The stop strings of a request, none of them empty."""
    strings = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if "" in strings:
        raise HttpError("stop cannot contain an empty string", param="stop")
    return strings


def num_choices(fields: SamplingFields, num_prompts: int = 1) -> int:
    """Choices for each prompt."""
    n = fields.n or 1
    if n * num_prompts > MAX_CHOICES:
        raise HttpError(f"{num_prompts} prompts with n={n} are above {MAX_CHOICES} choices a request", param="n")
    return n


def _field(location: Sequence[str | int]) -> str:
    """The field that a validation error is about, without the names of types that pydantic adds for unions."""
    names = (str(part) for part in location)
    return ".".join(takewhile(lambda name: name not in UNION_TYPES and "[" not in name, names))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse_unsupported(body: Mapping[str, Any], kind: type[Message]) -> None:
    for name in (NEUTRAL_VALUES.keys() & body.keys()) - kind.model_fields.keys():
        value = body[name]
        if value is not None and value not in NEUTRAL_VALUES[name]:
            raise HttpError(f"{name}={value!r:.80} is not supported by this server; leave it out", param=name)
