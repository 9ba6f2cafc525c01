import threading
import time

import numpy as np
import pytest
import torch

from prime_rl.data.rendering import load_tokenizer
from prime_rl.data.samples import NOT_SAMPLED, MicroBatch, TrainingBatch
from prime_rl.errors import DataError
from prime_rl.trainer.streams import DeviceBatch, LoggedBatches, PreparedBatches


def test_each_token_in_the_loss_is_predicted_by_the_one_before_it():
    row = MicroBatch(
        input_ids=np.array([5, 9, 7, 2, 8, 6], np.int32),
        loss_mask=np.array([False, False, True, True, False, True]),
        advantages=np.array([0, 0, 1, 2, 0, 3], np.float32),
        inference_logprobs=np.array([0, 0, -1, -2, 0, -3], np.float32),
        temperatures=np.array([1, 1, 0.5, 0.5, 2, 2], np.float32),
        seq_lens=np.array([4, 2], np.int32),
        ref_logprobs=np.array([np.nan, 0, -4, np.nan, 0, -5], np.float32),
        rl_weights=np.array([0, 0, 0.5, 1, 0, 0], np.float32),
        ref_kl_weights=np.array([0, 0, 2, 0, 0, 1], np.float32),
    )
    batch = DeviceBatch.from_numpy(row, torch.device("cpu"))
    assert batch.input_ids_T.tolist() == [5, 9, 7, 2, 8, 6]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.seq_lens == [4, 2]
    assert batch.predictors_N.tolist() == [1, 2, 4]
    assert batch.targets_N.tolist() == [7, 2, 6]
    assert batch.temperatures_N.tolist() == [0.5, 0.5, 2]
    assert batch.advantages_N.tolist() == [1, 2, 3]
    assert batch.inference_logprobs_N.tolist() == [-1, -2, -3]
    assert batch.ref_logprobs_N.tolist() == [-4, 0, -5]  # 0 where the reference was not asked
    assert batch.rl_weights_N.tolist() == [0.5, 1, 0]
    assert batch.ce_weights_N.tolist() == [0, 0, 0]
    assert batch.ref_kl_weights_N.tolist() == [2, 0, 1]
    assert batch.sequence_N.tolist() == [0, 0, 1]
    assert batch.targets_N.dtype == batch.sequence_N.dtype == torch.int64
    assert batch.advantages_N.dtype == torch.float32


def test_a_loss_sees_the_scores_beside_what_the_batch_says():
    batch = DeviceBatch.from_numpy(MicroBatch.dummy(), torch.device("cpu"))
    logprobs_N, entropies_N = torch.zeros(0), torch.ones(0)
    streams = batch.streams(logprobs_N, entropies_N)
    assert streams.logprobs_N is logprobs_N
    assert streams.entropies_N is entropies_N
    assert streams.ref_logprobs_N is None
    assert streams.num_sequences == 1
    for name in ("advantages_N", "inference_logprobs_N", "rl_weights_N", "ce_weights_N", "sequence_N"):
        assert getattr(streams, name) is getattr(batch, name)


def test_batches_pass_unchanged_while_the_first_sequence_of_each_is_logged(model_dir, caplog):
    tokenizer = load_tokenizer(model_dir)
    texts = ["first", "second"]
    token_ids = [tokenizer(text)["input_ids"] for text in texts]
    length = sum(map(len, token_ids))
    row = MicroBatch(
        input_ids=np.concatenate(token_ids).astype(np.int32),
        loss_mask=np.zeros(length, np.bool_),
        advantages=np.zeros(length, np.float32),
        inference_logprobs=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
        seq_lens=np.array([len(ids) for ids in token_ids], np.int32),
    )
    batch = TrainingBatch(
        step=7, micro_batches=[row], num_loss_tokens=0, min_version=NOT_SAMPLED, max_version=NOT_SAMPLED
    )

    class Source:
        def wait(self, step: int, idle) -> None:
            waited.append((step, idle))

        def next(self, step: int) -> TrainingBatch:
            return batch

    waited: list = []
    logged = LoggedBatches(Source(), tokenizer)
    logged.wait(7, print)
    with caplog.at_level("INFO", logger="prime_rl"):
        assert logged.next(7) is batch
    assert waited == [(7, print)]
    assert caplog.messages == ["Batch 7 begins with 'first'"]


class Made:
    """Makes batches on demand, in order; notes which thread asked. Step 2 fails."""

    def __init__(self, make_batch) -> None:
        self.make_batch = make_batch
        self.steps: list[int] = []
        self.threads: set[str] = set()

    def wait(self, step: int, idle) -> None:
        raise AssertionError("nobody is waited for")

    def next(self, step: int) -> TrainingBatch:
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        if step == 2:
            raise DataError("row 17 is malformed")
        return self.make_batch(step, seed=step)

    def position(self) -> bytes:
        return b"%d" % len(self.steps)

    def seek(self, position: bytes) -> None:
        self.steps = [-1] * int(position)


def test_the_next_batch_is_made_while_the_last_is_trained_on(make_batch):
    made = Made(make_batch)
    source = PreparedBatches(made, num_steps=2)
    source.wait(0, print)
    assert source.next(0) == make_batch(0, seed=0)
    deadline = time.monotonic() + 30
    while made.steps != [0, 1]:
        assert time.monotonic() < deadline, "batch 1 was not made ahead"
        time.sleep(0.001)
    assert source.next(1) == make_batch(1, seed=1)
    assert made.steps == [0, 1]  # the run has no step 2
    assert made.threads == {"batch 0", "batch 1"}


def test_an_error_comes_with_the_step_it_belongs_to(make_batch):
    source = PreparedBatches(Made(make_batch), num_steps=None)
    source.next(0)
    source.next(1)
    with pytest.raises(DataError, match="row 17"):
        source.next(2)
