import numpy as np
import pytest

from prime_rl.data.samples import MicroBatch, TrainingBatch, TrainingSample
from prime_rl.errors import DataError


def sample(**changes) -> TrainingSample:
    fields = {
        "token_ids": np.array([5, 9, 7, 2], np.int32),
        "loss_mask": np.array([False, False, True, True]),
        "logprobs": np.array([0, 0, -0.1, -1.2], np.float32),
        "versions": np.array([-1, -1, 3, 3], np.int32),
        "temperature": 1.0,
        "advantage": 0.5,
        "reward": 1.0,
        "env_name": "reverse-text",
        "rollout_id": "r1",
    }
    return TrainingSample(**{**fields, **changes})


def micro_batch(**changes) -> MicroBatch:
    fields = {
        "input_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "loss_mask": np.array([False, True, True, False, True]),
        "advantages": np.ones(5, np.float32),
        "inference_logprobs": np.zeros(5, np.float32),
        "temperatures": np.ones(5, np.float32),
        "seq_lens": np.array([3, 2], np.int32),
    }
    return MicroBatch(**{**fields, **changes})


def test_a_sample_equals_one_of_the_same_values_and_no_other():
    assert sample() == sample()
    assert sample() != sample(advantage=0.25)
    assert sample() != sample(token_ids=np.array([5, 9, 7, 3], np.int32))
    assert sample() != "sample"
    assert sample().num_loss_tokens == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([], np.int32)}, "no tokens"),
        (
            {"token_ids": np.array([5, 9, 7, 2])},
            r"token_ids must be a one-dimensional int32 array, not int64\[4\]",
        ),
        ({"token_ids": [5, 9, 7, 2]}, "not list"),
        ({"token_ids": np.array([5, -9, 7, 2], np.int32)}, "token_ids contains -9"),
        ({"loss_mask": np.array([False, True])}, "loss_mask has 2 entries for 4 tokens"),
        ({"loss_mask": np.array([True, False, True, True])}, "the first token is in the loss"),
        ({"loss_mask": np.array([False, True, True, True])}, "has no version"),
        ({"logprobs": np.array([0, -1, -0.1, -1.2], np.float32)}, "no policy sampled has a logprob"),
        ({"logprobs": np.array([0, 0, 0.1, -1.2], np.float32)}, "above 0"),
        ({"logprobs": np.array([0, 0, np.nan, -1.2], np.float32)}, r"logprobs\[2\] is nan"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"advantage": float("inf")}, "advantage is inf"),
        ({"reward": float("nan")}, "reward is nan"),
    ],
)
def test_a_sample_that_breaks_an_invariant_names_the_rollout_and_the_value(changes, message):
    with pytest.raises(DataError, match=message) as caught:
        sample(**changes)
    assert "'r1'" in str(caught.value)


def test_positions_restart_at_every_sequence():
    row = micro_batch()
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.positions.dtype == np.int32
    assert (row.num_tokens, row.num_loss_tokens) == (5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": np.array([3, 3], np.int32)}, "do not add up to 5 tokens"),
        ({"seq_lens": np.array([5, 0], np.int32)}, "do not add up"),
        (
            {"loss_mask": np.array([False, True, True, True, True])},
            "first token of a sequence is in the loss",
        ),
        ({"temperatures": np.array([1, 1, 0, 1, 1], np.float32)}, "temperatures contains 0"),
        ({"advantages": np.ones(4, np.float32)}, "advantages has 4 entries for 5 tokens"),
        ({"advantages": np.full(5, np.nan, np.float32)}, r"advantages\[0\] is nan"),
    ],
)
def test_a_micro_batch_that_breaks_an_invariant_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        micro_batch(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "never negative"),
        ({"micro_batches": []}, "no micro-batches"),
        ({"num_loss_tokens": 4}, "num_loss_tokens is 4, its masks hold 3"),
        ({"min_version": 3, "max_version": 2}, "versions 3 to 2 are not a range"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes, message):
    fields = {
        "step": 2,
        "micro_batches": [micro_batch()],
        "num_loss_tokens": 3,
        "min_version": 1,
        "max_version": 2,
    }
    batch = TrainingBatch(**fields)
    assert (batch.num_tokens, batch.num_sequences) == (5, 2)
    with pytest.raises(DataError, match=message):
        TrainingBatch(**{**fields, **changes})
