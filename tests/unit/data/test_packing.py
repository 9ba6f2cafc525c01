import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.data.balance import CostModel
from prime_rl.data.packing import build_batch, deal, pack
from prime_rl.data.samples import NOT_SAMPLED, MicroBatch, TrainingSample
from prime_rl.errors import DataError

COST = CostModel(linear=1.0, quadratic=0.01)


def sample(
    length: int, *, first_token: int = 0, version: int = 0, advantage: float = 0.0, **streams: np.ndarray
) -> TrainingSample:
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
        **streams,
    )


def documents(rows: list[MicroBatch]) -> list[tuple]:
    """Everything that rows say of each of their sequences, dummies left out, in an order of its own."""
    found = []
    for row in rows:
        for number in range(len(row.seq_lens)):
            mine = row.sequences == number
            arrays = [row.input_ids, row.loss_mask, row.advantages, row.inference_logprobs, row.temperatures]
            arrays += [row.stream_weights("rl"), row.stream_weights("ce"), row.stream_weights("ref_kl")]
            arrays += [np.zeros(row.num_tokens) if row.ref_logprobs is None else np.nan_to_num(row.ref_logprobs)]
            found.append(tuple(tuple(array[mine].tolist()) for array in arrays))
    return sorted(document for document in found if any(document[0]))


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


def test_optional_streams_are_carried_where_any_sample_has_them():
    plain = sample(3, first_token=1)
    taught = sample(
        4,
        first_token=2,
        ref_logprobs=np.array([0, -1, -2, -3], np.float32),
        rl_weights=np.array([0, 0, 0, 0.5], np.float32),
        ref_kl_weights=np.array([0, 1, 1, 0], np.float32),
    )
    (row,) = pack([plain, taught], seq_len=8)
    assert np.array_equal(row.ref_logprobs, [0, -1, -2, -3, np.nan, np.nan, np.nan], equal_nan=True)
    assert row.rl_weights.tolist() == [0, 0, 0, 0.5, 0, 1, 1]
    assert row.ref_kl_weights.tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert row.ce_weights is None
    assert row.stream_tokens == {"rl": 3, "ce": 0, "ref_kl": 2}
    (row,) = pack([plain], seq_len=8)
    assert row.ref_logprobs is row.rl_weights is row.ref_kl_weights is None


def test_a_single_rank_takes_the_rows_as_they_are():
    batch = build_batch(
        [sample(3, first_token=1), sample(5, first_token=2), sample(4, first_token=3)], step=0, seq_len=8
    )
    dealt = deal(batch, 1, 8, COST)
    assert dealt.rows == [batch.micro_batches]
    assert dealt.metrics == {"balance/fill": 12 / 16, "balance/idle": 0, "balance/dummies": 0}


def test_ranks_with_nothing_to_do_get_dummies_that_are_in_no_loss():
    batch = build_batch([sample(6, first_token=10), sample(2, first_token=20)], step=0, seq_len=8)
    assert len(batch.micro_batches) == 1
    dealt = deal(batch, 3, 8, CostModel(linear=1.0))
    assert [[row.seq_lens.tolist() for row in rows] for rows in dealt.rows] == [[[6]], [[2]], [[2]]]
    dummy = dealt.rows[2][0]
    assert dummy == MicroBatch.dummy()
    assert dummy.stream_tokens == {"rl": 0, "ce": 0, "ref_kl": 0}
    assert dealt.metrics["balance/fill"] == 8 / 24
    assert dealt.metrics["balance/idle"] == pytest.approx(1 - 8 / 18, rel=1e-6)
    assert dealt.metrics["balance/dummies"] == 1


def test_no_rank_has_the_slowest_row_of_every_micro_step():
    batch = build_batch([sample(length, first_token=100 * length) for length in (8, 7, 6, 5)], step=0, seq_len=8)
    dealt = deal(batch, 2, 8, CostModel(linear=1.0))
    assert [[row.num_tokens for row in rows] for rows in dealt.rows] == [[8, 5], [7, 6]]


def test_documents_are_dealt_by_their_tokens_in_the_loss_too():
    """By length alone each rank would have two; the head makes the first document as dear as the others."""
    samples = [sample(4, first_token=100 * index) for index in range(1, 5)]
    out = {"loss_mask": np.zeros(4, np.bool_), "logprobs": np.zeros(4, np.float32)}
    out["versions"] = np.full(4, NOT_SAMPLED, np.int32)
    samples[1:] = [msgspec.structs.replace(item, **out) for item in samples[1:]]
    dealt = deal(build_batch(samples, step=0, seq_len=16), 2, 16, CostModel(linear=1.0, per_loss_token=8 / 3))
    assert sorted(row.num_tokens for rows in dealt.rows for row in rows) == [4, 12]
    assert dealt.metrics["balance/idle"] == pytest.approx(0, abs=1e-6)


def test_a_document_longer_than_a_row_of_the_trainer_is_an_error():
    batch = build_batch([sample(9), sample(3)], step=4, seq_len=16)
    with pytest.raises(DataError, match=r"batch 4 holds a sequence of 9 tokens, more than a row of 8; raise .*seq_len"):
        deal(batch, 2, 8, COST)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(2, 5), st.integers(40, 120), st.booleans())
def test_dealing_conserves_every_document_and_gives_every_rank_as_many_rows(lengths, num_ranks, capacity, is_taught):
    def streams(length: int) -> dict[str, np.ndarray]:
        in_loss = (np.arange(length) > 0).astype(np.float32)
        return {"ce_weights": 0.5 * in_loss, "ref_kl_weights": in_loss, "ref_logprobs": -in_loss} if is_taught else {}

    samples = [
        sample(length, first_token=1 + 100 * index, advantage=float(index), **(streams(length) if index % 2 else {}))
        for index, length in enumerate(lengths)
    ]
    batch = build_batch(samples, step=0, seq_len=40)
    dealt = deal(batch, num_ranks, capacity, COST)
    rows = [row for rank_rows in dealt.rows for row in rank_rows]
    assert len(dealt.rows) == num_ranks
    assert len({len(rank_rows) for rank_rows in dealt.rows}) == 1
    assert documents(rows) == documents(batch.micro_batches)
    assert max(row.num_tokens for row in rows) <= capacity
    totals = [row.stream_tokens for row in rows]
    assert {stream: sum(total[stream] for total in totals) for stream in totals[0]} == batch.stream_tokens
    assert dealt.metrics["balance/dummies"] == sum(not row.input_ids.any() for row in rows)
    assert 0 <= dealt.metrics["balance/idle"] < 1
    assert 0 < dealt.metrics["balance/fill"] <= 1
    assert deal(batch, num_ranks, capacity, COST) == dealt
