import pytest

from prime_rl.errors import DeadlineExceeded
from prime_rl.trainer.rl.data import RolloutBatches
from prime_rl.transport.batches import BatchReader, BatchWriter


def test_batches_come_in_the_order_of_steps(tmp_path, make_batch):
    written = [make_batch(step, seed=step) for step in range(2)]
    for batch in written:
        BatchWriter(tmp_path).write(batch)
    source = RolloutBatches(BatchReader(tmp_path), timeout=5)
    assert [source.next(0), source.next(1)] == written


def test_the_wait_for_a_batch_has_an_end(tmp_path):
    source = RolloutBatches(BatchReader(tmp_path), timeout=0.01)
    with pytest.raises(DeadlineExceeded, match="no batch for step 0"):
        source.next(0)
