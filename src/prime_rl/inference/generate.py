"""POST /inference/v1/generate (older name /v1/generate): token ids in, token ids out, nothing in between.

No text is made unless the request has stop strings. The shape is vLLM's; see `transport/api.py`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.generation import Completion, Delta
from prime_rl.inference.http import read_json
from prime_rl.inference.logprobs import generate_logprobs, prompt_logprobs
from prime_rl.inference.requests import checked_prompt, num_choices, parse
from prime_rl.inference.service import Json, Service
from prime_rl.transport.api import GenerateRequest


async def generate(request: Request) -> Response:
    """Answer one request. `max_tokens` is all the room behind the prompt where it is not given, and at most that."""
    service: Service = request.app.state.service
    body = parse(await read_json(request), GenerateRequest)
    service.check_model(body.model)
    sampling = body.sampling_params
    prompt_ids = checked_prompt(body.token_ids, service.limits, param="token_ids")
    room = service.limits.max_model_len - len(prompt_ids)
    num_top = sampling.logprobs or 0
    choices = service.choices(
        prompt_ids,
        sampling,
        range(num_choices(sampling)),
        max_tokens=min(sampling.max_tokens or room, room),
        # The first of `top_logprobs` is the sampled token, which the engine reports anyway.
        num_top_logprobs=num_top if num_top > 1 else 0,
        num_prompt_logprobs=sampling.prompt_logprobs,
        with_text=False,
        stream=bool(body.stream),
    )
    return await service.respond(
        request,
        GenerateShape(service=service, body=body, request_id=body.request_id or uuid.uuid4().hex),
        choices,
        num_prompt_tokens=len(prompt_ids),
        stream=bool(body.stream),
        options=body.stream_options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateShape:
    """`GenerateResponse` and the chunks of its stream."""

    service: Service
    body: GenerateRequest
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> Json:
        return {
            "request_id": self.request_id,
            "model": self.service.model_name,
            "created": self.created,
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
            "prompt_logprobs": prompt_logprobs(completions[0].prompt_logprobs, None),
        }

    def opening(self) -> list[Json]:
        return []

    def chunk(self, delta: Delta) -> Json:
        return {"request_id": self.request_id, "choices": [self._choice(delta.index, delta)]}

    def closing(self) -> Json:
        return {"request_id": self.request_id, "choices": []}

    def _choice(self, index: int, part: Completion | Delta) -> Json:
        num_top = self.body.sampling_params.logprobs
        return {
            "index": index,
            "token_ids": [token.token_id for token in part.tokens],
            "logprobs": None if num_top is None else generate_logprobs(part.tokens, num_top=num_top),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
