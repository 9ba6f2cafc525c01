"""vLLM's engine with what RL adds to it: which weights sampled which tokens, and an adapter that everybody is served.

    SayVersions --ANSWER--> generate --PROMPT--> _add_request: the choice begins, with the adapter and the version that
                                                 are served now
    an update: pause, drain, end what has an adapter, load, `use_weights`: every choice in flight notes how many tokens
               it has

Uses of vLLM's internals: `_add_request` (the one place where a request gets its id and begins), the tokens of
`output_processor.request_states`, `engine_core.outputs_queue`, and `engine_core.core_engines` with
`_call_utility_async`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

from prime_rl.errors import DeadlineExceeded, InferenceError
from prime_rl.inference.vllm.versions import ANSWER, PROMPT, Prompt, Versions

DRAIN_TIMEOUT_S: Final = 60.0


class VersionedLLM(AsyncLLM):
    """One of vLLM's engines; all methods are called on one event loop."""

    @cached_property
    def versions(self) -> Versions:
        """Which weights sample, and what is in flight."""
        return Versions()

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's; an answer that says its versions learns of its choices here, in the order in which they stand."""
        check_stop_tokens(sampling_params, self.model_config.get_vocab_size())
        answer = ANSWER.get()
        if answer is not None and sampling_params.output_kind == RequestOutputKind.CUMULATIVE:
            # The generate route of 0.26 asks for all tokens so far at every token, and uses the last output only.
            sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        if sampling_params.output_kind == RequestOutputKind.DELTA and sampling_params.n > 1:
            return beginning_with_all(outputs, sampling_params)
        if answer is None or sampling_params.output_kind != RequestOutputKind.FINAL_ONLY:
            return cast(AsyncGenerator[RequestOutput, None], outputs)
        choices = Prompt(sampling_params.n)
        answer.prompts.append(choices)
        return self._counted(choices, outputs)

    async def _counted(
        self, choices: Prompt, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.versions.in_flight.add(choices)
        token = PROMPT.set(choices)  # read by _add_request, which runs before the first output comes
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for completion in output.outputs:
                        choices.choices[completion.index].num_tokens = len(completion.token_ids)
                    yield output
        finally:
            self.versions.in_flight.discard(choices)
            if PROMPT.get() is choices:
                PROMPT.reset(token)

    async def _add_request(self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
        # Nothing is awaited between this and the registration in `output_processor`, which comes first in vLLM's.
        self.versions.begin(request, PROMPT.get(), index)
        await super()._add_request(request, prompt, parent_req, index, queue)

    async def drained(self) -> None:
        """Wait, in a paused engine, until every token that it has sampled is counted.

        What the engine has sent lies before its answer to the pause. Its outputs are handled one after the other, so
        once an empty one behind them has been taken, all are done.
        """
        queue = self.engine_core.outputs_queue
        queue.put_nowait(EngineCoreOutputs())
        deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S
        while not queue.empty():
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded(f"vLLM's outputs were not handled within {DRAIN_TIMEOUT_S:g} s of the pause")
            await asyncio.sleep(0)

    async def ask_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answers of all workers of all copies of the model. vLLM's own `collective_rpc` gives the first copy's.

        Raises: InferenceError with the first `error` among them.
        """
        core = self.engine_core
        asked = [
            core._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
            for engine in core.core_engines
        ]
        answers = [answer for of_copy in await asyncio.gather(*asked) for answer in of_copy]
        for answer in answers:
            if "error" in answer:
                raise InferenceError(answer["error"])
        return answers

    async def end_adapters(self) -> None:
        """End all requests that have an adapter, and give none from now on: full weights would change what they sample.

        Their clients are told to ask again (503); a stream, whose answer has begun, ends with "abort". Waiting for them
        instead could take as long as clients keep asking.
        """
        states = self.output_processor.request_states
        ended = [request_id for request_id, state in states.items() if state.lora_request is not None]
        self.versions.use_adapter(None, 0)
        self.versions.drop(frozenset(ended))
        if ended:
            await self.abort(ended, internal=True)

    async def add_adapter(self, name: str, number: int, directory: Path) -> LoRARequest:
        """Have the workers load an adapter. `name` and `number` were never used before.

        Raises: InferenceError where one of them cannot.
        """
        await self.ask_workers("prime_rl_add_adapter", name, number, str(directory))
        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))

    async def join_transfer(self, info: dict[str, Any]) -> None:
        """Have the workers join the trainer's NCCL group."""
        await self.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    @property
    def has_nccl(self) -> bool:
        """Whether it computes where NCCL is."""
        return bool(current_platform.is_cuda())

    def use_weights(self, version: int) -> None:
        """Tokens from now on are sampled with full weights `version`. The engine is paused and drained."""
        self.versions.use_weights(version, self._num_tokens)

    def _num_tokens(self, request_id: str) -> int | None:
        """Tokens of a request in flight; None for one that has finished."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return None
        return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())


def check_stop_tokens(sampling_params: SamplingParams, vocab_size: int) -> None:
    """Raise VLLMValidationError, the client's fault, for a stop token that the model does not have.

    With `min_tokens`, vLLM writes to the logits at every stop token; on a GPU, one out of bounds ends the engine. 0.26
    does not look. To be removed when 0.26 is no longer supported.
    """
    unknown = [token for token in sampling_params.stop_token_ids or [] if not 0 <= token < vocab_size]
    if unknown:
        raise VLLMValidationError(
            f"stop_token_ids has {unknown[:3]}, and the vocabulary has {vocab_size} tokens", parameter="stop_token_ids"
        )


async def beginning_with_all(
    outputs: AsyncGenerator[RequestOutput, None], sampling_params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    """The pieces of a stream, the first of which names every choice, if only with nothing of it yet.

    The generate route of vLLM 0.26 to 0.29 counts the choices in the first piece, and fails (IndexError) at the first
    token of one that is not in it. vLLM's other routes pass over a choice without tokens, once they have seen that it
    has the logprobs that were asked for. To be removed with 0.29.
    """
    logprobs: list[Any] | None = None if sampling_params.logprobs is None else []
    async with aclosing(outputs):
        is_first = True
        async for output in outputs:
            if is_first:
                missing = sorted(set(range(sampling_params.n)) - {completion.index for completion in output.outputs})
                output.outputs += [
                    CompletionOutput(index=index, text="", token_ids=[], cumulative_logprob=None, logprobs=logprobs)
                    for index in missing
                ]
                is_first = False
            yield output
