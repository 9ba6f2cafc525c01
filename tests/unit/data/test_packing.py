import numpy as np
import pytest

from prime_rl.data.packing import build_batch, first_fit, pack
from prime_rl.data.samples import NOT_SAMPLED, TrainingSample
from prime_rl.errors import DataError


def sample(length: int, *, first_token: int = 0, version: int = 0, advantage: float = 0.0) -> TrainingSample:
    prompt = np.arange(length) == 0
    return TrainingSample(
        token_ids=np.arange(first_token, first_token + length, dtype=np.int32),
        loss_mask=~prompt,
        logprobs=np.where(prompt, 0, -0.5).astype(np.float32),
        versions=np.where(prompt, NOT_SAMPLED, version).astype(np.int32),
        temperature=0.5 + first_token,
        advantage=advantage,
        reward=0.0,
        env_name="e",
        rollout_id=f"r{first_token}",
    )


def test_each_item_goes_into_the_first_bin_with_room():
    assert first_fit([3, 4, 1], capacity=4) == [[0, 2], [1]]
    assert first_fit([2, 3, 2, 1], capacity=4) == [[0, 2], [1, 3]]
    assert first_fit([], capacity=4) == []


def test_longer_samples_are_placed_first_and_equal_ones_keep_their_order():
    rows = pack([sample(2, first_token=10), sample(3, first_token=20), sample(2, first_token=30)], seq_len=5)
    assert [row.seq_lens.tolist() for row in rows] == [[3, 2], [2]]
    assert rows[0].input_ids.tolist() == [20, 21, 22, 10, 11]
    assert rows[1].input_ids.tolist() == [30, 31]


def test_per_token_streams_belong_to_their_sample():
    (row,) = pack([sample(3, first_token=1, advantage=2.0), sample(2, first_token=2, advantage=-1.0)], seq_len=8)
    assert row.advantages.tolist() == [2, 2, 2, -1, -1]
    assert row.temperatures.tolist() == [1.5, 1.5, 1.5, 2.5, 2.5]
    assert row.loss_mask.tolist() == [False, True, True, False, True]
    assert row.inference_logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]


def test_no_token_is_lost_or_duplicated_and_no_row_overflows():
    lengths = np.random.default_rng(0).integers(1, 50, size=200)
    samples = [sample(int(length), first_token=100 * index) for index, length in enumerate(lengths)]
    rows = pack(samples, seq_len=64)
    packed = sorted(token for row in rows for token in row.input_ids.tolist())
    assert packed == sorted(token for item in samples for token in item.token_ids.tolist())
    assert max(row.num_tokens for row in rows) <= 64
    fewest = -(-int(lengths.sum()) // 64)
    assert len(rows) <= fewest * 11 / 9 + 1


def test_a_sample_that_does_not_fit_is_an_error_and_never_cut():
    with pytest.raises(DataError, match=r"'r7' \(e\) has 9 tokens, more than seq_len = 8"):
        pack([sample(9, first_token=7)], seq_len=8)


def test_a_batch_counts_its_loss_tokens_and_versions():
    batch = build_batch([sample(3, version=4), sample(5, version=2), sample(1)], step=5, seq_len=8)
    assert (batch.step, batch.num_loss_tokens) == (5, 6)
    assert (batch.min_version, batch.max_version) == (2, 4)
    assert batch.num_tokens == 9


def test_a_batch_that_no_policy_sampled_has_no_versions():
    batch = build_batch([sample(1)], step=0, seq_len=8)
    assert (batch.min_version, batch.max_version) == (NOT_SAMPLED, NOT_SAMPLED)
