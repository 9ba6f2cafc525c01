import numpy as np
import pytest

from prime_rl.data.samples import NOT_SAMPLED
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import longest_sample, training_samples


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
