import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.data.balance import CostModel
from prime_rl.data.packing import build_batch, deal
from prime_rl.data.samples import NOT_SAMPLED
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import longest_sample, malformed, merge_turns, training_samples
from prime_rl.errors import DataError


def turn_of(prompt_ids, completion_ids, version=3):
    size = len(completion_ids)
    return Turn(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=[-0.5] * size, versions=[version] * size)


def samples_of(*turns, strategy="interleaved"):
    rollout = Rollout(id=7, env="e", example=1, turns=list(turns), reward=0.75)
    return training_samples(rollout, advantage=0.25, temperature=0.9, strategy=strategy)


def test_one_turn_is_one_sample_with_only_the_completion_in_the_loss():
    (sample,) = samples_of(turn_of([5, 9], [7, 2]))
    assert sample.token_ids.tolist() == [5, 9, 7, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert sample.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 3, 3]
    assert (sample.advantage, sample.reward, sample.temperature) == (0.25, 0.75, 0.9)
    assert (sample.env_name, sample.rollout_id) == ("e", "7")


def test_turns_that_extend_each_other_are_one_sample_and_what_lies_between_is_not_trained_on():
    (sample,) = samples_of(turn_of([5, 9], [7, 2], version=3), turn_of([5, 9, 7, 2, 4], [8], version=4))
    assert sample.token_ids.tolist() == [5, 9, 7, 2, 4, 8]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert np.array_equal(sample.logprobs != 0, sample.loss_mask)


def test_a_turn_whose_prompt_was_rewritten_starts_a_sample_of_its_own():
    first, second = samples_of(turn_of([5, 9], [7, 2]), turn_of([5, 9, 6, 4], [8]))
    assert first.token_ids.tolist() == [5, 9, 7, 2]
    assert second.token_ids.tolist() == [5, 9, 6, 4, 8]
    assert [first.rollout_id, second.rollout_id] == ["7/0", "7/1"]


def test_turns_of_two_conversations_find_their_own_sample_again():
    turns = [turn_of([1], [2]), turn_of([5], [6]), turn_of([1, 2, 3], [4]), turn_of([5, 6, 7], [8])]
    samples = samples_of(*turns)
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_branching_makes_a_sample_of_every_turn_with_all_before_it_as_context():
    turns = turn_of([5, 9], [7, 2], version=3), turn_of([5, 9, 7, 2, 4], [8], version=4)
    first, second = samples_of(*turns, strategy="branching")
    assert first.token_ids.tolist() == [5, 9, 7, 2]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.versions.tolist() == [-1, -1, 3, 3]
    assert second.token_ids.tolist() == [5, 9, 7, 2, 4, 8]
    assert second.loss_mask.tolist() == [False, False, False, False, False, True]
    assert second.logprobs.tolist() == [0, 0, 0, 0, 0, -0.5]
    assert second.versions.tolist() == [-1, -1, -1, -1, -1, 4]
    assert [first.rollout_id, second.rollout_id] == ["7/0", "7/1"]
    assert first.advantage == second.advantage == 0.25


def test_by_both_strategies_every_sampled_token_is_trained_on_once():
    turns = [turn_of([1], [2, 3]), turn_of([5], [6]), turn_of([1, 2, 3, 4], [7]), turn_of([1, 2, 9], [8])]
    for strategy, number in (("interleaved", 3), ("branching", 4)):
        samples = samples_of(*turns, strategy=strategy)
        assert len(samples) == number
        assert sorted(token for s in samples for token in s.token_ids[s.loss_mask].tolist()) == [2, 3, 6, 7, 8]
        assert max(len(sample.token_ids) for sample in samples) == 5
    assert longest_sample(Rollout(id=1, env="e", example=0, turns=turns)) == 5


def test_the_longest_sample_is_the_longest_turn_with_its_prompt():
    rollout = Rollout(id=1, env="e", example=0, turns=[turn_of([1] * 5, [2] * 2), turn_of([1] * 3, [2] * 3)])
    assert longest_sample(rollout) == 7


def test_a_failed_rollout_is_never_trained_on():
    failure = Failure(kind=FailureKind.TIMEOUT, message="slow")
    rollout = Rollout(id=1, env="e", example=0, turns=[turn_of([1], [2])], failure=failure)
    with pytest.raises(AssertionError, match="never trained on"):
        training_samples(rollout, advantage=0.0, temperature=1.0)


@st.composite
def transcripts(draw):
    """Turns of one rollout: conversations that go on, are rewritten, start anew, or run beside each other.

    Ids are of four tokens only, so that prompts often begin alike; logprob and version tell sampled tokens apart.
    """
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    turns, histories = [], []
    number = 0
    for _ in range(draw(st.integers(1, 6))):
        history = draw(st.sampled_from(histories)) if histories and draw(st.integers(0, 4)) else []
        if history and draw(st.integers(0, 3)) == 0:  # a template that rewrites, such as one that drops thoughts
            place = draw(st.integers(0, len(history) - 1))
            history = history[:place] + draw(st.lists(st.integers(0, 3), max_size=2)) + history[place + 1 :]
        prompt = [*history, *(draw(tokens) if draw(st.booleans()) or not history else [])]
        completion = draw(st.lists(st.integers(0, 3), max_size=4))
        names = range(number, number + len(completion))
        number += len(completion)
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[-1.0 - name for name in names],
                versions=[name % 5 for name in names],
            )
        )
        histories.append([*prompt, *completion])
    return turns


def sampled_by(turns):
    """(logprob, id, version) of every sampled token, with the exact tokens before it."""
    return sorted(
        (logprob, token, version, (*turn.prompt_ids, *turn.completion_ids[:place]))
        for turn in turns
        for place, (token, logprob, version) in enumerate(
            zip(turn.completion_ids, turn.logprobs, turn.versions, strict=True)
        )
    )


def trained_on(samples):
    return sorted(
        (sample.logprobs[place], token, sample.versions[place], tuple(sample.token_ids[:place].tolist()))
        for sample in samples
        for place, token in enumerate(sample.token_ids.tolist())
        if sample.loss_mask[place]
    )


@settings(deadline=None, max_examples=100)
@given(transcripts(), st.sampled_from(["interleaved", "branching"]))
def test_whatever_the_turns_each_sampled_token_is_trained_on_once_after_exactly_what_the_model_saw(turns, strategy):
    samples = samples_of(*turns, strategy=strategy)
    assert trained_on(samples) == sampled_by(turns)
    assert max(len(sample.token_ids) for sample in samples) <= longest_sample(
        Rollout(id=1, env="e", example=0, turns=turns)
    )


@settings(deadline=None, max_examples=50)
@given(transcripts())
def test_a_sample_starts_only_where_a_prompt_extends_no_sample_before_it(turns):
    before = []
    for turn in turns:
        chains = merge_turns([*before, turn], "interleaved")
        extends = any(
            list(turn.prompt_ids[: len(chain.token_ids)]) == list(chain.token_ids)
            for chain in merge_turns(before, "interleaved")
        )
        assert len(chains) - len(merge_turns(before, "interleaved")) == (0 if extends else 1)
        before.append(turn)
    for chain in merge_turns(turns, "interleaved"):
        spans = [place for start, end in chain.sampled for place in range(start, end)]
        assert spans == [place for place, version in enumerate(chain.versions) if version != NOT_SAMPLED]


@settings(deadline=None, max_examples=40)
@given(st.lists(transcripts(), min_size=1, max_size=5), st.integers(1, 3))
def test_from_turns_to_the_rows_of_ranks_no_sampled_token_is_lost_doubled_or_given_another_logprob(rollouts, num_ranks):
    rollouts = [
        [
            Turn(
                prompt_ids=turn.prompt_ids,
                completion_ids=turn.completion_ids,
                logprobs=[logprob - 100 * index for logprob in turn.logprobs],
                versions=turn.versions,
            )
            for turn in turns
        ]
        for index, turns in enumerate(rollouts)
    ]
    samples = [sample for turns in rollouts for sample in samples_of(*turns)]
    seq_len = max(len(sample.token_ids) for sample in samples) + 3
    batch = build_batch(samples, step=4, seq_len=seq_len)
    rows = [row for rank in deal(batch, num_ranks, seq_len, CostModel(linear=1.0)).rows for row in rank]
    for packed in (batch.micro_batches, rows):
        found = [
            (logprob, token)
            for row in packed
            for logprob, token in zip(
                row.inference_logprobs[row.loss_mask].tolist(), row.input_ids[row.loss_mask].tolist(), strict=True
            )
        ]
        expected = [one[:2] for turns in rollouts for one in sampled_by(turns)]
        assert sorted(found) == sorted(expected)
    assert batch.num_loss_tokens == sum(len(turn.completion_ids) for turns in rollouts for turn in turns)


GOOD = {"prompt_ids": (1, 2), "completion_ids": (3, 4), "logprobs": (-0.5, 0.00005), "versions": (0, 1)}


@pytest.mark.parametrize(
    ("instead", "fault"),
    [
        ({"logprobs": (-0.5,)}, "turn 2 has 2 sampled tokens, 1 logprobs and 2 versions"),
        ({"versions": (1,)}, "turn 2 has 2 sampled tokens, 2 logprobs and 1 versions"),
        ({"completion_ids": ()}, "turn 2 has 0 sampled tokens, 2 logprobs and 2 versions"),
        ({"prompt_ids": ()}, "turn 2 has no prompt"),
        ({"prompt_ids": (5, -1)}, "turn 2 has token ids from -1 to 5"),
        ({"prompt_ids": (1, 2, 3, 4, 9, -7)}, "turn 2 has token ids from -7 to 9"),
        ({"completion_ids": (5, 2**31)}, "turn 2 has token ids from 5 to 2147483648"),
        ({"logprobs": (-0.5, 0.01)}, "turn 2 has a logprob of 0.01"),
        ({"logprobs": (float("nan"), -0.5)}, "turn 2 has a logprob of nan"),
        ({"logprobs": (-0.5, float("-inf"))}, "turn 2 has a logprob of -inf"),
        ({"logprobs": (-0.5, float("nan"))}, "turn 2 has a logprob of nan"),
        ({"logprobs": (-0.5, -1e39)}, "turn 2 has a logprob of -1e+39"),
        ({"logprobs": (-sys.float_info.max,) * 2}, "turn 2 has a logprob of -1.7976931348623157e+308"),
        ({"versions": (1, -1)}, "turn 2 has a token of weights -1"),
        ({"versions": (2**31, 1)}, "turn 2 has a token of weights 2147483648"),
    ],
)
def test_what_is_wrong_with_an_answer_is_found_before_it_becomes_a_sample(instead, fault):
    turns = [Turn(**GOOD), Turn(**(GOOD | instead))]
    rollout = Rollout(id=7, env="e", example=1, turns=turns, reward=0.75)
    assert malformed(rollout) == fault
    with np.errstate(over="ignore"), pytest.raises((DataError, OverflowError)):
        training_samples(rollout, advantage=0.25, temperature=0.9, strategy="branching")


def test_a_rollout_of_which_nothing_was_sampled_cannot_be_trained_on():
    empty = {"completion_ids": (), "logprobs": (), "versions": ()}
    for turns in ([], [Turn(**(GOOD | empty))]):
        assert malformed(Rollout(id=7, env="e", example=1, turns=turns, reward=0.75)) == "no token was sampled"
    both = [Turn(**GOOD), Turn(**(GOOD | empty))]
    assert malformed(Rollout(id=7, env="e", example=1, turns=both, reward=0.75)) == ""
