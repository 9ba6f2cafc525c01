"""The embedded engine: continuous batching in a background thread behind an asyncio face.

    event loop                          engine thread
    generate --- commands ------------> between two steps: add, abort, swap weights, pause
             <-- one callback a step -- schedule -> launch -> collect -> append

Where the runner looks ahead (a GPU), a step is launched before the one before it is collected, so that scheduling,
appending and delivery happen while the GPU computes. A token that ends a request is then found one step late: what that
step drew for it is dropped.

    row        consumes               waits for              unblocked by
    engine     commands, its blocks   a command when idle    any method of `Engine`
    generate   tokens of one request  its next tokens        the step that sampled them, or the engine's failure

An exception in the thread is the engine's end: it is logged, every request fails with it, and so does every later call.
A request whose own parameters leave nothing to draw fails alone.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import xxhash
from msgspec.structs import replace
from torch import Tensor

from prime_rl.inference.backend import (
    EngineFailed,
    EngineStats,
    GenerationRequest,
    RequestError,
    TokenOutput,
)
from prime_rl.inference.engine.prompt_logprobs import PromptScorer
from prime_rl.inference.engine.runner import Launched, Runner
from prime_rl.inference.engine.sampler import Sampled
from prime_rl.inference.engine.scheduler import Scheduler, Sequence
from prime_rl.logs import get_logger
from prime_rl.models.hf import hf_tensors

logger = get_logger(__name__)


class _Stream:
    """Tokens of one request on their way to the task that waits for them. Event loop only, but for `sequence`."""

    def __init__(self, request: GenerationRequest, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.whole = not request.stream
        self.sequence = sequence
        self.loop = loop
        self.held: list[TokenOutput] = []  # engine thread: outputs of a request that wants them at the end
        self.arrived: list[TokenOutput] = []
        self.error: EngineFailed | RequestError | None = None
        self.wake = asyncio.Event()

    def deliver(self, outputs: list[TokenOutput]) -> None:
        self.arrived += outputs
        self.wake.set()

    def fail(self, error: EngineFailed | RequestError) -> None:
        self.error = error
        self.wake.set()


Delivery = tuple[_Stream, list[TokenOutput]]
Failure = tuple[_Stream, EngineFailed | RequestError]


class Engine:
    """Implements `Backend`. Built from complete parts by `engine.build.build_engine`; the thread starts here."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        eos_token_ids: frozenset[int],
        seed: int,
        deterministic: bool = False,
    ) -> None:
        """`seed` is that of requests without one. `deterministic`: what is drawn is a function of the request alone."""
        self.runner = runner
        self.scheduler = scheduler
        self.max_model_len = scheduler.max_model_len
        self.vocab_size = runner.decoder.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.version = 0
        self._seed = seed
        self._seeds = None if deterministic else Random(seed)
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._in_flight: tuple[Launched, int] | None = None  # a launched step and its weights version
        self._paused = False
        self._closing = False
        self._failure: EngineFailed | None = None
        self._prompt_tokens = self._generated = self._finished = self._aborted = self._steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- event loop side ----------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError for a request that can never be served."""
        request.sampling.validate(vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        prompt = request.prompt_ids
        if not prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and the server's limit for prompt and completion together is "
                f"{self.max_model_len}"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise RequestError(f"prompt token ids must be in [0, {self.vocab_size - 1}]")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenOutput], None]:
        self.check(request)
        if self._failure is not None:
            raise self._failure
        stream = _Stream(request, self._sequence(request), asyncio.get_running_loop())
        scorer = stream.sequence.scorer
        self._submit(lambda: self._add(stream))
        finished = False
        try:
            while not finished:
                await stream.wake.wait()
                stream.wake.clear()
                outputs, stream.arrived = stream.arrived, []
                if outputs:
                    if scorer is not None:
                        outputs[0] = replace(outputs[0], prompt_logprobs=scorer.result)
                        scorer = None
                    finished = outputs[-1].finish_reason is not None
                    yield outputs
                elif stream.error is not None:
                    raise stream.error
        finally:
            if not finished and stream.error is None:
                self._submit(lambda: self._abort(stream))

    def _sequence(self, request: GenerationRequest) -> Sequence:
        sampling = request.sampling
        num_top = sampling.num_prompt_logprobs
        scorer = None if num_top is None else PromptScorer(request.prompt_ids, num_top, self.vocab_size)
        return Sequence(
            request_id=request.request_id,
            tokens=list(request.prompt_ids),
            prompt_len=len(request.prompt_ids),
            sampling=sampling,
            stop_ids=sampling.stop_ids(self.eos_token_ids),
            seed=self._seed_of(request),
            reads_history=sampling.reads_history,
            scorer=scorer,
        )

    def _seed_of(self, request: GenerationRequest) -> int:
        """In 64 bits. Where it may not depend on the order of arrival, the prompt is part of it: the turns of a rollout
        ask with one seed, and each draws anew."""
        given = request.sampling.seed
        if self._seeds is not None:
            return self._seeds.getrandbits(64) if given is None else given % 2**64
        base = self._seed + request.choice if given is None else given
        prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        return xxhash.xxh3_64_intdigest(prompt.tobytes(), seed=base % 2**64)

    def weights(self) -> Mapping[str, Tensor]:
        return dict(hf_tensors(self.runner.decoder))

    async def update_weights(self, swap: Callable[[], None], version: int, *, recompute: bool = False) -> None:
        def update() -> None:
            self.runner.swap_weights(swap)
            self.scheduler.weights_changed(recompute=recompute)
            self.version = version

        await self._call(update, ends_engine=True)

    async def pause(self) -> None:
        await self._call(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        cache = scheduler.cache
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            kv_blocks_used=cache.num_blocks - cache.num_free,
            kv_blocks_total=cache.num_blocks,
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated,
            prefix_query_tokens_total=scheduler.prefix_query_tokens,
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens,
            finished_total=self._finished,
            aborted_total=self._aborted,
            steps_total=self._steps,
            version=self.version,
            paused=self._paused,
            error=None if self._failure is None else str(self._failure),
        )

    async def close(self) -> None:
        self._submit(lambda: setattr(self, "_closing", True))
        await asyncio.to_thread(self._thread.join)

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the engine thread run `command` between two steps; run it here when that thread has ended."""
        with self._changed:
            ended = self._failure is not None
            if not ended:
                self._commands.append(command)
                self._changed.notify()
        if ended:
            command()

    async def _call(self, command: Callable[[], None], *, ends_engine: bool = False) -> None:
        """Run `command` on the engine thread with no step in flight and wait for it; its exception is raised here.

        It ends nothing else unless `ends_engine`: then the engine fails with it.
        """
        done: Future[None] = Future()
        self._submit(lambda: self._try(command, done, ends_engine))
        await asyncio.wrap_future(done)

    # -- engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while not self._closing:
                self._obey()
                if not self._closing:
                    self._step()
        except BaseException as error:
            logger.exception("the inference engine failed")
            reason = error
        self._end(reason)

    def _obey(self) -> None:
        """Run the commands that have come; while there is nothing to compute, wait for more."""
        while True:
            with self._changed:
                while not self._commands and (self._paused or not self.scheduler.has_work) and not self._closing:
                    self._changed.wait()
                command = self._commands.popleft() if self._commands else None
            if command is not None:
                command()
                command = None  # it may hold all weights, and the next one may be long in coming
            elif self._closing or (self.scheduler.has_work and not self._paused):
                return

    def _try(self, command: Callable[[], None], done: Future[None], ends_engine: bool) -> None:
        """A method: a function within `_call` that submits itself would be a cycle, and keep what `command` holds."""
        if self._failure is not None:
            done.set_exception(self._failure)
            return
        collected = False
        try:
            self._collect()
            collected = True
            command()
        except Exception as error:
            if ends_engine or not collected:
                self._submit(lambda: self._try(command, done, ends_engine))  # for `_end`, which makes it known first
                raise
            done.set_exception(error)
        else:
            done.set_result(None)

    def _add(self, stream: _Stream) -> None:
        if self._failure is not None:
            self._post([], [(stream, self._failure)])
            return
        assert stream.sequence.request_id not in self._streams, stream.sequence.request_id
        self._streams[stream.sequence.request_id] = stream
        self._prompt_tokens += stream.sequence.prompt_len
        self.scheduler.add(stream.sequence)

    def _abort(self, stream: _Stream) -> None:
        if self._streams.pop(stream.sequence.request_id, None) is not None:
            self.scheduler.remove(stream.sequence)
            self._aborted += 1

    def _step(self) -> None:
        """Launch a step and collect it or, where the runner looks ahead, the one before it."""
        if self._in_flight is not None and any(sequence.reads_history for sequence in self.scheduler.running):
            self._collect()  # the ids of all tokens so far are needed
        chunks = self.scheduler.schedule()
        launched = (self.runner.launch(chunks), self.version) if chunks else None
        self._collect()
        self._in_flight = launched
        if not self.runner.looks_ahead:
            self._collect()

    def _collect(self) -> None:
        """Wait for the step in flight, if there is one, and hand out its tokens."""
        if self._in_flight is None:
            return
        (launched, version), self._in_flight = self._in_flight, None
        sampled = launched.collect()
        self._steps += 1
        if sampled is not None:
            sequences = launched.sequences
            failures = [self._fail(sequences[row]) for row in sampled.undrawn if not sequences[row].ended]
            self._post(self._append(sequences, sampled, version), failures)

    def _fail(self, sequence: Sequence) -> Failure:
        """Take out a request that has nothing to draw from; returns what its stream is due."""
        stream = self._streams[sequence.request_id]
        self._abort(stream)
        return stream, RequestError(
            "the request's sampling parameters leave no finite distribution to draw from: bring temperature and "
            "penalties closer to their defaults, or allow more tokens"
        )

    def _append(self, sequences: list[Sequence], sampled: Sampled, version: int) -> list[Delivery]:
        """Add one token to every sequence that has one; returns what their streams are due."""
        deliveries: list[Delivery] = []
        append, streams, tops = self.scheduler.append, self._streams, sampled.top_logprobs
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, sampled.token_ids, sampled.logprobs, strict=True)
        ):
            if sequence.ended:
                continue
            reason = append(sequence, token)
            self._generated += 1
            output = TokenOutput(
                token_id=token,
                logprob=logprob,
                version=version,
                top_logprobs=tops.get(row, ()),
                finish_reason=reason,
            )
            stream = streams[sequence.request_id]
            if reason is not None:
                del streams[sequence.request_id]
                self._finished += 1
            if stream.whole:
                stream.held.append(output)
                if reason is not None:
                    deliveries.append((stream, stream.held))
            else:
                deliveries.append((stream, [output]))
        return deliveries

    def _post(self, deliveries: list[Delivery], failures: list[Failure]) -> None:
        """Hand tokens and failures to the event loops of their streams, one callback a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}
        for stream, outputs in deliveries:
            by_loop.setdefault(stream.loop, []).append((stream.deliver, outputs))
        for stream, error in failures:
            by_loop.setdefault(stream.loop, []).append((stream.fail, error))
        for loop, calls in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_call_all, calls)

    def _end(self, reason: BaseException | None) -> None:
        """Fail what is in flight and what was asked meanwhile."""
        message = "was closed" if reason is None else f"failed: {type(reason).__name__}: {reason}"
        with self._changed:
            self._failure = EngineFailed(f"the inference engine {message}")
            self._failure.__cause__ = reason
            commands, self._commands = self._commands, deque()
        streams, self._streams = list(self._streams.values()), {}
        self._post([], [(stream, self._failure) for stream in streams])
        for command in commands:
            command()


def _call_all(calls: list[tuple[Callable[[Any], None], Any]]) -> None:
    for call, argument in calls:
        call(argument)
