import asyncio
import collections
import gc
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.environments import frames
from prime_rl.environments.frames import Frames
from prime_rl.environments.rollouts import CancelRollout, Rollout, RolloutRequest, ScoreGroup, Turn

tokens = st.lists(st.integers(0, 3), max_size=4)


@pytest.fixture
async def ends():
    ours, theirs = [await Frames.over(connection) for connection in socket.socketpair()]
    yield ours, theirs
    await ours.close()
    await theirs.close()


def turn_of(prompt_ids, completion_ids):
    num = len(completion_ids)
    return Turn(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=(-0.25,) * num,
        versions=(7,) * num,
    )


async def test_messages_arrive_in_order_and_whole(ends):
    sent = [
        RolloutRequest(id=1, example=2, sampling={"temperature": 0.5}, version=3, timeout_s=4, group=5, group_size=6)
    ]
    sent += [ScoreGroup(ids=[1, 2]), CancelRollout(id=3)]
    for message in sent:
        ends[0].send(message)
    assert [await ends[1].read() for _ in sent] == sent
    await ends[0].close()
    assert await ends[1].read() is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), tokens, tokens), max_size=6))
def test_turns_come_back_as_they_were_whether_they_extend_each_other_or_not(script):
    turns: list[Turn] = []
    for extends, more, completion_ids in script:
        before = [*turns[-1].prompt_ids, *turns[-1].completion_ids] if turns and extends else []
        turns.append(turn_of([*before, *more], completion_ids))
    rollout = Rollout(id=1, env="e", example=2, turns=turns, reward=0.5, messages=[{"role": "user"}])
    shortened = frames.shortened(rollout)
    assert frames.restored(shortened) == rollout
    sent = sum(len(turn.prompt_ids) for turn in shortened.rollout.turns)
    assert sent <= sum(len(turn.prompt_ids) for turn in turns)


async def test_a_conversation_is_sent_once_and_not_once_a_turn(ends):
    turns = [turn_of(list(range(100 * number, 100 * number + 50)), [9] * 50) for number in range(1)]
    for _ in range(19):
        turns.append(turn_of([*turns[-1].prompt_ids, *turns[-1].completion_ids, 8], [9] * 50))
    rollout = Rollout(id=1, env="e", example=2, turns=turns, reward=0.5)
    assert sum(len(turn.prompt_ids) for turn in frames.shortened(rollout).rollout.turns) == 50 + 19
    ends[0].send(rollout)
    assert await ends[1].read() == rollout


async def test_the_garbage_collector_does_not_look_at_the_tokens_of_rollouts_that_wait(ends):
    turns = [turn_of([1, 2], [1000, 2000]), turn_of([1, 2, 1000, 2000, 3], [4])]
    ends[0].send(Rollout(id=1, env="e", example=2, turns=turns, reward=0.5))
    arrived = await ends[1].read()
    gc.collect()
    assert arrived.turns == turns
    for turn in arrived.turns:
        sequences = (turn.prompt_ids, turn.completion_ids, turn.logprobs, turn.versions)
        assert not any(map(gc.is_tracked, (turn, *sequences)))


async def test_a_thousand_rollouts_that_arrive_together_leave_turns_to_the_rest_of_the_loop(ends, monkeypatch):
    monkeypatch.setattr(frames, "READ_BUDGET_S", 0.001)
    rollout = Rollout(id=1, env="e", example=2, turns=[turn_of([5] * 50, [6] * 50)], reward=0.5)
    for _ in range(1000):
        ends[0].send(rollout)
    num_turns = 0

    async def rest():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(rest())
    read_at_turn = collections.Counter()
    for _ in range(1000):
        assert await ends[1].read() is not None
        read_at_turn[num_turns] += 1
    running.cancel()
    assert max(read_at_turn.values()) < 500, "without a budget nearly all of them are read in one go"
