"""A backend without a model, for tests of whatever stands on the `Backend` protocol.

Token i of a completion is `script(prompt_ids, i)`; by default a fixed function of the prompt, so that equal prompts
give equal completions.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import torch
from torch import Tensor

from prime_rl.inference.backend import (
    EngineFailed,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    RequestError,
    TokenOutput,
)


def default_script(prompt_ids: Sequence[int], index: int) -> int:
    """A printable ASCII id for every position of every prompt."""
    return 32 + (sum(prompt_ids) + 7 * index) % 90


class FakeBackend:
    """Generates `script` tokens, one a turn of the event loop, with logprob -(index + 1) / 100.

    `gate` is an event that generation waits on before each token: clear it to hold requests in flight.
    `failure`, when set, is raised by every running and later request. `updates` are (version, recompute) pairs.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 256,
        vocab_size: int = 128,
        eos_token_ids: frozenset[int] = frozenset({0}),
        script: Callable[[Sequence[int], int], int] = default_script,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.script = script
        self.version = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.tensors = {"embed.weight": torch.zeros(4, 2), "norm.weight": torch.ones(2)}
        self.updates: list[tuple[int, bool]] = []
        self.requests: list[GenerationRequest] = []
        self.generated = 0
        self.closed = False

    def check(self, request: GenerationRequest) -> None:
        request.sampling.validate(vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        if len(request.prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens; the limit is {self.max_model_len - 1}"
            )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenOutput], None]:
        self.check(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        finished = False
        held: list[TokenOutput] = []
        try:
            for index in range(request.sampling.max_tokens):
                await asyncio.sleep(0)
                await self.gate.wait()
                if self.failure is not None:
                    raise self.failure
                output = self._token(request, index)
                self.generated += 1
                finished = output.finish_reason is not None
                held.append(output)
                if request.stream or finished:
                    yield held
                    held = []
                if finished:
                    return
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.cancelled.append(request.request_id)

    def _token(self, request: GenerationRequest, index: int) -> TokenOutput:
        sampling = request.sampling
        token = self.script(request.prompt_ids, index)
        logprob = -(index + 1) / 100
        reason = None
        ends = token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos)
        if ends and index + 1 > sampling.min_tokens:
            reason = FinishReason.STOP
        elif index + 1 == sampling.max_tokens or len(request.prompt_ids) + index + 1 == self.max_model_len:
            reason = FinishReason.LENGTH
        others = ((token + rank, logprob - rank) for rank in range(sampling.num_top_logprobs))
        return TokenOutput(
            token_id=token,
            logprob=logprob,
            version=self.version,
            top_logprobs=tuple((other % self.vocab_size, value) for other, value in others),
            finish_reason=reason,
            prompt_logprobs=self._score(request) if index == 0 else None,
        )

    def _score(self, request: GenerationRequest) -> PromptLogprobs | None:
        """Every prompt token at logprob -1 and rank 2, behind the token after it in the vocabulary."""
        num_top = request.sampling.num_prompt_logprobs
        if num_top is None:
            return None
        best = [((token + 1) % self.vocab_size, -0.5, 1) for token in request.prompt_ids]
        return [
            None,
            *(
                [(token, -1.0, 2), *[top][:num_top]]
                for token, top in zip(request.prompt_ids[1:], best[1:], strict=True)
            ),
        ]

    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    async def update_weights(self, swap: Callable[[], None], version: int, *, recompute: bool = False) -> None:
        try:
            swap()
        except Exception as error:
            self.failure = EngineFailed(f"the inference engine failed: {error}")
            raise self.failure from error
        self.updates.append((version, recompute))
        self.version = version

    async def pause(self) -> None:
        self.gate.clear()

    async def resume(self) -> None:
        self.gate.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            generated_tokens_total=self.generated,
            aborted_total=len(self.cancelled),
            version=self.version,
            paused=not self.gate.is_set(),
            error=None if self.failure is None else str(self.failure),
        )

    async def close(self) -> None:
        self.closed = True
