"""The HTTP messages between the inference server and its clients, both directions in one place.

    POST /update_weights          UpdateWeightsRequest -> ServedWeights
    POST /reload_weights          (no body)            -> ServedWeights: the model that the server was started with
    POST /init_weight_transfer    InitTransferRequest  -> StatusResponse; NCCL only
    GET  /weights                 (no body)            -> WeightsResponse: a checksum of every tensor that is served
    POST /pause, /resume          (no body)            -> StatusResponse
    GET  /health                  (no body)            -> HealthResponse, or 503 with ErrorResponse
    POST /inference/v1/generate   GenerateRequest      -> GenerateResponse; /v1/generate is its older name

Every answer of a generation route that is no stream says which weights sampled its tokens: `versions`, a list of
`[version, number of tokens]` for every choice. A request with the header `X-Prime-Min-Version` is refused (503) by a
server that serves older weights.

Every 4xx and 5xx answer is an ErrorResponse. The generate route takes and returns token ids; its shape is that of
vLLM's route of the same name, plus `versions`. Unknown fields of a request are ignored, as vLLM does; a field that is
known but would change the result and is not implemented is refused, never ignored.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MIN_VERSION_HEADER: Final = "X-Prime-Min-Version"
"""The oldest weights that may sample a request's tokens. A server that came back with its first weights is not asked to
finish a rollout that newer ones began."""

VersionRuns = list[tuple[int, int]]
"""`(version, number of tokens)` runs of one choice, in the order in which its tokens were sampled."""

MAX_VERSION = 2**53
"""Largest version of weights: every reader of JSON, and every gauge, knows whole numbers up to it exactly."""

MAX_CHOICES = 1024
"""Largest number of choices that one request may ask for (`n` times the number of prompts)."""

MAX_LOGPROBS = 20
"""Largest number of alternatives reported for a token, as in the OpenAI API."""

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
"""Token ids; validation stops at the first that is none, for there may be millions."""

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "chat_template": (),
    "content_parts": ([],),
    "documents": ([],),
    "echo": (False,),
    "features": (),
    "logprob_token_ids": ([],),
    "priority": (0,),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of vLLM's requests that would change the result and are not implemented, with the values (beside null) that
ask for nothing. Any other value is refused by a route that has no such field."""


class Message(BaseModel):
    """Base of what a client sends: exact JSON types (no "5" for 5), finite numbers, unknown fields ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


class Answer(BaseModel):
    """Base of what the server sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingFields(Message):
    """How to sample, in the names that vLLM and the OpenAI API share.

    The defaults sample from the model's own distribution. The server does not read sampling defaults from the model's
    `generation_config.json`: a top-k that nobody asked for would make its logprobs differ from the trainer's.
    """

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices to sample for each prompt; default 1. Choice i of a seeded request samples with seed + i."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    """Divides the logits; 0 takes the most likely token; default 1."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """Sample among the k most likely tokens only; 0 and -1 mean all of them."""

    min_p: Probability | None = None
    """Drop tokens less likely than this share of the most likely one."""

    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    """Divides positive and multiplies negative logits of tokens that prompt or completion have."""

    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the completion has."""

    frequency_penalty: Penalty | None = None
    """Subtracted from the logits of the completion's tokens, once for each time."""

    logit_bias: dict[str, float] | None = None
    """Added to logits, by token id; values are taken as at most 100 and at least -100."""

    allowed_token_ids: TokenIds | None = None
    """The only tokens that may be sampled."""

    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    """Words that the completion will not have."""

    seed: Int64 | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to sample; the default differs by route."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Neither end-of-sequence nor a stop ends the choice before this many tokens."""

    stop: str | list[str] | None = None
    """The text ends before the first of these strings."""

    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; default true. Token ids are never left out."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the logprob of every token of the prompt, and this many most likely ones at its place, under the model's
    own distribution. Not in a stream."""


class StreamOptions(Message):
    """What a stream carries beside the tokens."""

    include_usage: bool | None = None
    """Send one more chunk with the token counts at the end."""

    continuous_usage_stats: bool | None = None
    """Send the token counts so far with every chunk."""


class GenerateSampling(SamplingFields):
    """Sampling of the generate route."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the logprob of every sampled token, with this many entries in `top_logprobs` (the sampled one first)."""


class GenerateRequest(Message):
    """Sample from token ids.

    Example: `{"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 8, "logprobs": 1}}`
    """

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Accepted and without effect: cached prompts are never shared across weights, the use that RL has for a salt."""


class TokenLogprob(Answer):
    """A token, spelled `token_id:<id>`, and its logprob under the distribution that it was sampled from."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class SampledLogprob(TokenLogprob):
    """The sampled token of one position, and alternatives to it."""

    top_logprobs: list[TokenLogprob]


class Logprobs(Answer):
    """One entry per sampled token."""

    content: list[SampledLogprob]


class PromptLogprob(Answer):
    """One token at one place of the prompt."""

    logprob: float
    rank: int
    """Among all tokens, from 1."""

    decoded_token: str | None
    """The token as text; None on the generate route."""


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry per prompt token, by token id: the token itself first. None for the first token, which nothing predicts."""


class GenerateChoice(Answer):
    """T sampled tokens of one choice; `logprobs` is there when it was asked for."""

    index: int
    token_ids: list[int]
    """[T]"""

    logprobs: Logprobs | None = None
    """[T]"""

    finish_reason: Literal["stop", "length"] | None
    """None only in chunks of a stream that are not the last."""

    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice; None for end-of-sequence."""


class Usage(Answer):
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(Answer):
    """The answer of the generate route, and one chunk of its stream (`model` and `created` are missing there)."""

    request_id: str
    model: str | None = None
    created: int | None = None
    choices: list[GenerateChoice]
    usage: Usage | None = None
    versions: list[VersionRuns] | None = None
    """One entry per choice; the counts of a choice sum to its sampled tokens. Not in chunks of a stream."""

    prompt_logprobs: PromptLogprobs | None = None


class UpdateWeightsRequest(Message):
    """Swap in what the trainer published in a directory: all weights, an adapter, or the announcement of an NCCL
    transfer (the directory's manifest says which).

    Example: `{"weight_dir": "/run/weights/step_3", "version": 3}`
    """

    weight_dir: Annotated[str, Field(min_length=1)]
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]


class InitTransferRequest(Message):
    """Join the trainer's NCCL group, in which the trainer is rank 0."""

    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    """Rank of the server's first GPU."""

    world_size: Annotated[int, Field(ge=2)]
    """The trainer and all GPUs of all servers."""

    timeout: Annotated[float, Field(gt=0)] = 1200.0
    """Seconds to wait for the others."""


class ServedWeights(Answer):
    """The weights in use. `digest` is that of `transport.checksum`, of the tensors themselves; None for the model that
    the server was started with."""

    version: int
    digest: str | None


class WeightsResponse(ServedWeights):
    """Every tensor that is served, under its Hugging Face name, with its checksum (`transport.checksum`)."""

    tensors: dict[str, str]


class StatusResponse(Answer):
    """The answer of /pause, /resume and /init_weight_transfer."""

    status: Literal["paused", "resumed", "connected"]


class HealthResponse(ServedWeights):
    """The server is able to answer requests, with these weights."""

    status: Literal["ok"] = "ok"
    instance: str
    """Differs between two starts of a server, so that a client notices one that was restarted."""

    paused: bool = False
    """Whether generation waits for /resume; an update alone does not say so."""


class ErrorInfo(Answer):
    """What is wrong and with which field; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Answer):
    """The OpenAI API's form of an error."""

    error: ErrorInfo
