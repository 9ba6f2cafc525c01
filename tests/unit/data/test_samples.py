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


def weights(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


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
        ({"loss_mask": np.array([False, True, True, True])}, "in the rl loss but has no version"),
        ({"rl_weights": weights(0, 0, 0, 1)}, "token 2 is in the loss mask but in no stream"),
        ({"rl_weights": weights(0, 1, 1, 1)}, "token 1 is outside the loss mask"),
        ({"ce_weights": weights(0, 0, -1, 1)}, "ce_weights contains -1.0; a weight is never negative"),
        ({"ce_weights": weights(0, 0, 1)}, "ce_weights has 3 entries for 4 tokens"),
        ({"ce_weights": np.array([0, 0, 1, 1])}, "ce_weights must be a one-dimensional float32 array"),
        ({"ref_kl_weights": weights(0, 0, 0, 1)}, "ref_kl_weights where it has no ref_logprobs"),
        (
            {"ref_kl_weights": weights(0, 0, 0, 1), "ref_logprobs": weights(0, 0, -1, np.nan)},
            "ref_kl_weights where it has no ref_logprobs",
        ),
        ({"ref_logprobs": weights(0, 0, -np.inf, 0)}, r"ref_logprobs\[2\] is -inf"),
        ({"ref_logprobs": weights(0, 0, 0, 1)}, "ref_logprobs contains 1.0, above 0"),
        (
            {
                "loss_mask": np.array([False, True, True, True]),
                "rl_weights": weights(0, 0, 1, 1),
                "ref_kl_weights": weights(0, 1, 0, 0),
                "ref_logprobs": weights(0, -1, 0, 0),
            },
            "in the ref_kl loss but has no version",
        ),
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


def test_without_weights_every_token_in_the_loss_is_in_the_rl_stream_alone():
    assert sample().stream_tokens == {"rl": 2, "ce": 0, "ref_kl": 0}
    assert sample().stream_weights("rl").tolist() == [0, 0, 1, 1]
    assert sample().stream_weights("ce").tolist() == [0, 0, 0, 0]
    assert sample().stream_weights("rl").dtype == sample().stream_weights("ce").dtype == np.float32


def test_a_token_that_nobody_sampled_may_be_in_the_cross_entropy():
    found = sample(
        loss_mask=np.array([False, True, True, True]),
        rl_weights=weights(0, 0, 1, 1),
        ce_weights=weights(0, 0.1, 0, 0.1),
    )
    assert found.stream_tokens == {"rl": 2, "ce": 2, "ref_kl": 0}
    assert found.num_loss_tokens == 3


def test_where_no_reference_was_asked_is_known():
    found = sample(ref_logprobs=weights(np.nan, np.nan, -1, np.nan))
    assert found.num_without_reference("rl") == 1
    assert found.num_without_reference("ref_kl") == 0
    assert sample().num_without_reference("rl") == 2
    assert found == sample(ref_logprobs=weights(np.nan, np.nan, -1, np.nan))


def test_a_batch_counts_the_tokens_of_each_stream_over_its_rows():
    taught = micro_batch(ref_kl_weights=weights(0, 1, 0, 0, 0.5), ref_logprobs=weights(0, -1, 0, 0, -2))
    batch = TrainingBatch(
        step=0, micro_batches=[micro_batch(), taught], num_loss_tokens=6, min_version=0, max_version=0
    )
    assert batch.stream_tokens == {"rl": 6, "ce": 0, "ref_kl": 2}


def test_a_dummy_is_a_row_with_nothing_in_the_loss():
    dummy = MicroBatch.dummy()
    assert dummy.num_tokens == 2
    assert dummy.num_loss_tokens == 0
    assert dummy.stream_tokens == {"rl": 0, "ce": 0, "ref_kl": 0}


def test_positions_restart_at_every_sequence():
    row = micro_batch()
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.sequences.tolist() == [0, 0, 0, 1, 1]
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
        ({"ce_weights": np.full(5, 0.5, np.float32)}, r"by its weights \(rl, ce, ref_kl\), token 0 is outside"),
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
