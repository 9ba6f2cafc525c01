from dataclasses import replace

import msgspec
import pytest
from tests.doubles.state import state_of

from prime_rl.errors import DataError
from prime_rl.orchestrator.state import FORMAT, decode, encode


def test_a_state_with_groups_in_every_stage_comes_back_as_it_was():
    state = state_of()
    stages = {(group.scored is not None, len(group.results), len(group.in_flight)) for group in state.scheduler.groups}
    assert {(True, 2, 0), (False, 2, 0), (False, 1, 1), (False, 0, 2)} <= stages
    back = decode(encode(state))
    assert back == state
    assert back.next_batch == 1
    ready = next(group for group in back.scheduler.groups if group.scored is not None)
    assert [scored.rollout for scored in ready.scored] == [result for _, result in ready.results]
    assert ready.scored[1].samples[0].versions.dtype == "int32"


def test_the_turns_of_a_conversation_are_kept_once():
    state = state_of()
    group = next(group for group in state.scheduler.groups if group.results)
    dispatch, rollout = group.results[0]
    turn, sizes = rollout.turns[0], []
    for number in (10, 20, 40):
        turns, before = [], ()
        for _ in range(number):
            prompt = (*before, 7, 8, 9)
            turns.append(msgspec.structs.replace(turn, prompt_ids=prompt))
            before = (*prompt, *turn.completion_ids)
        long = msgspec.structs.replace(rollout, turns=turns)
        only = replace(group, results=[(dispatch, long)], scored=None)
        sizes.append(len(encode(msgspec.structs.replace(state, scheduler=replace(state.scheduler, groups=[only])))))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0]), "it grows with the turns, and not with their square"


@pytest.mark.parametrize(
    "content", [b"", b"abc", msgspec.msgpack.encode({"format": FORMAT}), msgspec.msgpack.encode([])]
)
def test_what_is_no_state_is_told(content):
    with pytest.raises(DataError, match="it is no state of an orchestrator: "):
        decode(content)


def test_a_state_that_was_cut_off_is_told():
    content = encode(state_of())
    with pytest.raises(DataError, match="it is no state of an orchestrator: "):
        decode(content[: len(content) // 2])


def test_a_state_of_another_version_is_told():
    with pytest.raises(DataError, match=r"it has format 99; this version of prime-rl reads format 1"):
        decode(msgspec.msgpack.encode({"format": 99}))
