import asyncio
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from prime_rl.inference.backend import EngineFailed, FinishReason, GenerationRequest, SamplingParams, TokenOutput
from prime_rl.inference.fake import FakeBackend
from prime_rl.inference.generation import Choice, Generator
from prime_rl.inference.http import HttpError
from prime_rl.inference.metrics import RequestMetrics


def generator(backend):
    return Generator(backend=backend, metrics=RequestMetrics(CollectorRegistry(), "tiny"))


def choice(index=0, *, max_tokens=4, stream=True):
    sampling = SamplingParams(max_tokens=max_tokens)
    request = GenerationRequest(request_id=str(index), prompt_ids=[index + 1], sampling=sampling, stream=stream)
    return Choice(index=index, request=request, text=None)


async def test_choices_come_back_in_order_and_whole():
    completions = await generator(FakeBackend()).complete([choice(1, max_tokens=9), choice(0, max_tokens=2)])
    assert [len(completion.tokens) for completion in completions] == [9, 2]
    assert [completion.finish_reason for completion in completions] == ["length", "length"]


async def test_deltas_of_several_choices_are_interleaved():
    deltas = [delta.index async for delta in generator(FakeBackend()).sample([choice(0), choice(1)])]
    assert sorted(deltas) == [0] * 4 + [1] * 4
    assert deltas != sorted(deltas)


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_deltas_cancels_every_choice(n):
    backend = FakeBackend()
    async with aclosing(generator(backend).sample([choice(i, max_tokens=100) for i in range(n)])) as deltas:
        async for _ in deltas:
            break
    assert backend.running == set()
    assert len(backend.cancelled) == n


async def test_one_failing_choice_ends_the_others():
    backend = FakeBackend()
    backend.script = lambda prompt_ids, index: 33 if prompt_ids[0] == 1 or index < 2 else 1 // 0
    with pytest.raises(ZeroDivisionError):
        await generator(backend).complete([choice(i, max_tokens=50) for i in range(3)])
    assert backend.running == set()


async def test_a_failed_engine_is_told_as_it_is():
    backend = FakeBackend()
    backend.failure = EngineFailed("gone")
    with pytest.raises(EngineFailed, match="gone"):
        await generator(backend).complete([choice()])


class Scripted(FakeBackend):
    """Yields what it is told, whatever was asked."""

    def __init__(self, *items):
        super().__init__()
        self.items = items

    async def generate(self, request):
        for item in self.items:
            await asyncio.sleep(0)
            yield item


def token(token_id, reason=None):
    return TokenOutput(token_id=token_id, logprob=-1.0, version=0, finish_reason=reason)


async def test_an_aborted_request_is_an_error_and_not_a_completion():
    with pytest.raises(HttpError, match="aborted") as caught:
        await generator(Scripted([token(5)], [token(6, FinishReason.ABORT)])).complete([choice()])
    assert caught.value.status == 503


async def test_a_request_that_just_ends_is_an_error_and_not_a_completion():
    with pytest.raises(HttpError, match="before it was complete"):
        await generator(Scripted([token(5)])).complete([choice()])


async def test_end_of_sequence_has_no_stop_reason_and_other_stop_tokens_have():
    ended = await generator(Scripted([token(5), token(0, FinishReason.STOP)])).complete([choice()])
    stopped = await generator(Scripted([token(5), token(7, FinishReason.STOP)])).complete([choice()])
    assert (ended[0].stop_reason, stopped[0].stop_reason) == (None, 7)
