import math
import socket

import msgspec
import numpy as np
import pytest

from prime_rl.config.trainer import FakeDataConfig
from prime_rl.data.packing import build_batch
from prime_rl.errors import DataError, DeadlineExceeded
from prime_rl.trainer.rl.data import FakeBatches, RolloutBatches
from prime_rl.transport.batches import BatchReader, BatchWriter


def test_batches_come_in_the_order_of_steps(tmp_path, make_batch):
    written = [make_batch(step, seed=step) for step in range(2)]
    for batch in written:
        BatchWriter(tmp_path).write(batch)
    source = RolloutBatches(BatchReader(tmp_path), timeout=5)
    source.wait(0, print)
    assert [source.next(0), source.next(1)] == written


def test_the_wait_for_a_batch_has_an_end(tmp_path):
    source = RolloutBatches(BatchReader(tmp_path), timeout=0.01)
    with pytest.raises(DeadlineExceeded, match="no batch for step 0"):
        source.wait(0, lambda: None)


def test_a_machine_that_does_not_see_the_batch_of_rank_0_says_so_soon(tmp_path):
    source = RolloutBatches(BatchReader(tmp_path), timeout=3600, seen_within=0.01)
    with pytest.raises(DeadlineExceeded) as caught:
        source.next(4)
    assert f"rank 0 sees batch 4 in {tmp_path / 'step_4'}, this machine ({socket.gethostname()}) does not" in str(
        caught.value
    )
    assert "output_dir must be on a disk that all nodes share" in str(caught.value)


def test_a_teacher_that_was_not_asked_for_every_token_is_missed(tmp_path, make_samples):
    samples = make_samples(2)
    taught = msgspec.structs.replace(samples[0], ref_logprobs=-samples[0].loss_mask.astype(np.float32))
    BatchWriter(tmp_path).write(build_batch([taught, samples[1]], step=0, seq_len=64))
    BatchWriter(tmp_path).write(build_batch([taught], step=1, seq_len=64))
    source = RolloutBatches(BatchReader(tmp_path), timeout=5, teacher_tau=0.5)
    missing = samples[1].num_loss_tokens
    with pytest.raises(DataError, match=rf"batch 0 has {missing} tokens .* loss\.teacher_tau = 0\.5 needs"):
        source.next(0)
    assert source.next(1).num_loss_tokens == taught.num_loss_tokens
    assert RolloutBatches(BatchReader(tmp_path), timeout=5).next(0).num_sequences == 2


def fake(*, seed: int = 0, **fields) -> FakeBatches:
    return FakeBatches(FakeDataConfig.model_validate(fields), max_seq_len=64, vocab_size=100, seed=seed)


def test_made_up_samples_of_fixed_length_fill_their_micro_batches():
    source = fake(batch_size=6, micro_batch_size=2, seq_len=16)
    batch = source.next(3)
    assert batch.step == 3
    assert [row.seq_lens.tolist() for row in batch.micro_batches] == [[16, 16]] * 3
    assert source.max_row_tokens == 32


def test_made_up_samples_of_variable_length_are_packed_and_none_is_lost():
    source = fake(batch_size=200, micro_batch_size=4, seq_len=5, length="variable")
    rows = source.next(0).micro_batches
    lengths = [length for row in rows for length in row.seq_lens.tolist()]
    assert len(lengths) == 200
    assert set(lengths) == {2, 3, 4, 5}
    assert max(row.num_tokens for row in rows) <= 20
    assert len(rows) < 50  # that many would be needed with four samples each


def test_the_length_of_made_up_samples_follows_the_model():
    assert fake().next(0).num_tokens == 2 * 64


def test_made_up_tokens_are_of_the_vocabulary_and_all_but_the_first_are_in_the_loss():
    for row in fake(batch_size=40).next(0).micro_batches:
        assert 0 <= row.input_ids.min() < 5
        assert 95 <= row.input_ids.max() < 100
        assert row.loss_mask.tolist() == [False] + [True] * 63


def test_made_up_advantages_have_both_signs_and_their_policy_is_uniform():
    batch = fake(batch_size=4, seq_len=8).next(0)
    assert [row.advantages.tolist() for row in batch.micro_batches] == [[1] * 8, [-1] * 8, [1] * 8, [-1] * 8]
    for row in batch.micro_batches:
        assert row.inference_logprobs[row.loss_mask] == pytest.approx(-math.log(100))
    assert (batch.min_version, batch.max_version) == (0, 0)


def tokens(source: FakeBatches, step: int) -> list[int]:
    return np.concatenate([row.input_ids for row in source.next(step).micro_batches]).tolist()


def test_every_step_sees_the_same_made_up_samples_unless_it_shall_have_its_own():
    same, new = fake(), fake(generate_samples=True)
    assert tokens(same, 0) == tokens(same, 1)
    assert tokens(new, 0) != tokens(new, 1)
    assert tokens(new, 1) == tokens(fake(generate_samples=True), 1)
    assert tokens(new, 1) != tokens(fake(generate_samples=True, seed=1), 1)
