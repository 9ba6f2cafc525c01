"""Life of requests in the engine's thread: delivery, cancellation, pause, failure, closing."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.backend import (
    EngineFailed,
    FinishReason,
    GenerationRequest,
    RequestError,
    SamplingParams,
    TokenOutput,
)
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.engine.engine import Engine
from prime_rl.inference.engine.runner import CpuRunner, Launched
from prime_rl.inference.engine.sampler import Sampled
from prime_rl.inference.engine.scheduler import Chunk

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = build_engine(
        InferenceConfig.model_validate({"model": {"name": str(tmp_path)}, "device": "cpu", "max_num_seqs": 8})
    )
    yield engine
    await engine.close()


def request(name: str = "a", prompt: list[int] | None = None, **fields: Any) -> GenerationRequest:
    stream = fields.pop("stream", True)
    sampling = SamplingParams(**({"max_tokens": 5, "ignore_eos": True, "seed": 0} | fields))
    return GenerationRequest(request_id=name, prompt_ids=prompt or [2, 3, 4], sampling=sampling, stream=stream)


async def test_tokens_arrive_in_pieces_and_the_last_says_why(engine: Engine) -> None:
    pieces = [piece async for piece in engine.generate(request())]
    outputs = [output for piece in pieces for output in piece]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert all(output.version == 0 and output.logprob < 0 for output in outputs)


async def test_without_streaming_all_tokens_come_at_once_and_are_the_same(engine: Engine) -> None:
    pieces = [piece async for piece in engine.generate(request(stream=False))]
    streamed = [output async for piece in engine.generate(request()) for output in piece]
    assert pieces == [streamed]


async def test_a_stop_token_ends_a_request(engine: Engine) -> None:
    free = [output async for piece in engine.generate(request(max_tokens=40)) for output in piece]
    stop = free[7].token_id
    outputs = [
        output async for piece in engine.generate(request(max_tokens=40, stop_token_ids=(stop,))) for output in piece
    ]
    assert outputs[-1].token_id == stop
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(outputs) == 1 + [output.token_id for output in free].index(stop)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=[2] * 4096), "4096 tokens"),
        (request(prompt=[40]), r"\[0, 39\]"),
        (request(prompt=[-1]), r"\[0, 39\]"),
        (request(max_tokens=0), "max_tokens"),
        (request(temperature=-1.0), "temperature"),
        (request(temperature=float("nan")), "temperature"),
        (request(top_p=0.0), "top_p"),
        (request(top_k=-2), "top_k"),
        (request(min_p=2.0), "min_p"),
        (request(min_tokens=9), "min_tokens"),
        (request(repetition_penalty=0.0), "repetition_penalty"),
        (request(repetition_penalty=1e-40), "repetition_penalty"),
        (request(repetition_penalty=101.0), "repetition_penalty"),
        (request(min_tokens=2, stop_token_ids=tuple(range(40))), "no other token"),
        (request(min_tokens=2, stop_token_ids=(0, *range(2, 40)), ignore_eos=False), "no other token"),
        (GenerationRequest(request_id="x", prompt_ids=[], sampling=SamplingParams(max_tokens=1)), "empty"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_before_it_is_queued(
    engine: Engine, bad: GenerationRequest, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        await anext(engine.generate(bad))
    assert engine.stats().prompt_tokens_total == 0


async def test_stop_tokens_may_leave_one_token_or_be_all_where_no_minimum_is_asked(engine: Engine) -> None:
    one_left = request(min_tokens=2, stop_token_ids=(0, *range(2, 40)), stream=False)
    assert [output.token_id for output in await anext(engine.generate(one_left))][:2] == [1, 1]
    none_left = request(stop_token_ids=tuple(range(40)), stream=False)
    assert [output.finish_reason for output in await anext(engine.generate(none_left))] == [FinishReason.STOP]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_leaves_nothing_to_draw_ends_alone(engine: Engine, stream: bool) -> None:
    expected = [output async for piece in engine.generate(request("good", max_tokens=30)) for output in piece]
    await engine.pause()
    good = asyncio.create_task(anext(engine.generate(request("good", max_tokens=30, stream=False))))
    bad = asyncio.create_task(anext(engine.generate(request("bad", temperature=1e-40, stream=stream))))
    await asyncio.sleep(0)
    await engine.resume()
    with pytest.raises(RequestError, match="no finite distribution"):
        await bad
    assert [output.token_id for output in await good] == [output.token_id for output in expected]
    stats = engine.stats()
    assert (stats.error, stats.num_running, stats.kv_blocks_used) == (None, 0, 0)
    assert (stats.finished_total, stats.aborted_total) == (2, 1)
    assert stats.generated_tokens_total == 60


async def test_closing_the_iterator_frees_the_blocks(engine: Engine) -> None:
    iterator = engine.generate(request(max_tokens=4000))
    await anext(iterator)
    assert engine.stats().kv_blocks_used > 0
    await iterator.aclose()
    await engine.pause()  # returns after the engine has obeyed what came before it
    stats = engine.stats()
    assert (stats.num_running, stats.kv_blocks_used, stats.aborted_total) == (0, 0, 1)


async def test_cancelling_the_waiting_task_frees_the_blocks(engine: Engine) -> None:
    async def consume() -> None:
        async for _ in engine.generate(request(max_tokens=4000, stream=False)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    await engine.pause()
    assert engine.stats().num_running + engine.stats().num_waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.resume()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.aborted_total) == (0, 0, 0, 1)


async def test_a_paused_engine_generates_nothing_and_drops_nothing(engine: Engine) -> None:
    expected = [output async for piece in engine.generate(request(max_tokens=60)) for output in piece]
    iterator = engine.generate(request(max_tokens=60))
    outputs = await anext(iterator)
    await engine.pause()
    steps = engine.stats().steps_total
    late = asyncio.create_task(anext(engine.generate(request("late"))))
    await engine.pause()
    assert engine.stats().steps_total == steps
    assert engine.stats().paused
    assert not late.done()
    await engine.resume()
    await late
    outputs = outputs + [output async for piece in iterator for output in piece]
    assert [output.token_id for output in outputs] == [output.token_id for output in expected]


async def test_requests_without_a_seed_differ(engine: Engine) -> None:
    runs = [
        [output.token_id async for piece in engine.generate(request(seed=None, max_tokens=30)) for output in piece]
        for _ in range(2)
    ]
    assert runs[0] != runs[1]


class AheadRunner:
    """A runner on the CPU that is asked for a step before the one before it is collected, as on a GPU."""

    looks_ahead = True

    def __init__(self, runner: CpuRunner) -> None:
        self.runner = runner
        self.decoder = runner.decoder
        self.drawn: dict[str, list[int]] = {}  # tokens in flight
        self.uncollected = self.most_uncollected = 0

    def launch(self, chunks: list[Chunk]) -> Launched:
        ahead = [(chunk.sequence, self.drawn.get(chunk.sequence.request_id, [])) for chunk in chunks]
        for sequence, drawn in ahead:
            sequence.tokens += drawn
        launched = self.runner.launch(chunks)
        for sequence, drawn in ahead:
            del sequence.tokens[len(sequence.tokens) - len(drawn) :]
        sampled = launched.collect()
        for row, sequence in enumerate(launched.sequences):
            assert sampled is not None
            self.drawn.setdefault(sequence.request_id, []).append(sampled.token_ids[row])
        self.uncollected += 1
        self.most_uncollected = max(self.uncollected, self.most_uncollected)

        def collect() -> Sampled | None:
            self.uncollected -= 1
            for sequence in launched.sequences:
                del self.drawn[sequence.request_id][0]
            return sampled

        return Launched(sequences=launched.sequences, collect=collect)

    def swap_weights(self, swap: Callable[[], None]) -> None:
        assert self.uncollected == 0
        self.runner.swap_weights(swap)


async def test_running_ahead_changes_no_token(engine: Engine) -> None:
    """Stop tokens are found a step late, blocks run out, one request is abandoned and weights change in between."""

    async def run() -> list[list[tuple[int, float, int]]]:
        prompts = [[2 + row, 3, 4 + row] for row in range(8)]
        asked = [
            request(f"r{row}", prompt, max_tokens=30, seed=row, stop_token_ids=(5, 6), stream=row % 2 == 0)
            for row, prompt in enumerate(prompts)
        ]
        asked[3] = request("r3", prompts[3], max_tokens=30, seed=3, repetition_penalty=1.3)
        abandoned = engine.generate(request("gone", max_tokens=4000))
        found = asyncio.gather(*(_collect(engine, one) for one in asked))
        await anext(abandoned)
        await abandoned.aclose()
        await engine.pause()
        await engine.resume()
        return [[(o.token_id, o.logprob, o.version) for o in outputs] for outputs in await found]

    expected = await run()
    assert isinstance(engine.runner, CpuRunner)
    ahead = AheadRunner(engine.runner)
    engine.runner = ahead
    found = await run()
    await engine.update_weights(lambda: None, 1)
    assert (ahead.most_uncollected, ahead.uncollected) == (2, 0)
    assert [[token for token, _, _ in row] for row in found] == [[token for token, _, _ in row] for row in expected]
    assert [[lp for _, lp, _ in row] for row in found] == [
        pytest.approx([lp for _, lp, _ in row], abs=1e-5) for row in expected
    ]
    assert len({len(row) for row in expected}) > 2  # some stopped early
    stats = engine.stats()
    assert (stats.num_running, stats.kv_blocks_used, stats.generated_tokens_total >= 2 * sum(map(len, expected))) == (
        0, 0, True,
    )  # fmt: skip


async def _collect(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [output async for piece in engine.generate(request) for output in piece]


async def test_a_failing_step_fails_every_request_and_all_later_calls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.pause()
    tasks = [asyncio.create_task(anext(engine.generate(request(name)))) for name in "ab"]
    await asyncio.sleep(0)

    def explode(chunks: object) -> None:
        raise RuntimeError("out of magic")

    monkeypatch.setattr(engine.runner, "launch", explode)
    await engine.resume()
    for task in tasks:
        with pytest.raises(EngineFailed, match="RuntimeError: out of magic"):
            await task
    for later in (anext(engine.generate(request("c"))), engine.pause()):
        with pytest.raises(EngineFailed, match="out of magic"):
            await later
    assert "out of magic" in (engine.stats().error or "")
    assert "the inference engine failed" in caplog.text


async def test_closing_fails_what_is_in_flight(engine: Engine) -> None:
    iterator = engine.generate(request(max_tokens=4000, stream=False))
    waiting = asyncio.create_task(anext(iterator))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineFailed, match="was closed"):
        await waiting
    await engine.close()


async def test_what_an_update_brought_is_let_go_of_at_once(engine: Engine) -> None:
    """It holds all weights once more, a gigabyte that no garbage collector would be in a hurry to look for."""

    class Swap:
        def __call__(self) -> None:
            pass

    swap = Swap()
    held = weakref.ref(swap)
    gc.disable()
    try:
        await engine.update_weights(swap, 1)
        del swap
        for _ in range(100):
            if held() is None:
                break
            await asyncio.sleep(0.01)
        assert held() is None
    finally:
        gc.enable()
