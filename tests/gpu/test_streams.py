"""A micro-batch on the GPU is that on the CPU, and uploading it makes the host wait for nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest
import torch

from prime_rl.data.samples import MicroBatch
from prime_rl.trainer.streams import DeviceBatch

pytestmark = pytest.mark.gpu


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_upload_equals_the_batch_and_waits_for_nothing() -> None:
    rng = np.random.default_rng(0)
    lens = np.array([4000, 90, 6], np.int32)
    length = int(lens.sum())
    in_loss = rng.random(length) < 0.7
    in_loss[np.cumsum(lens) - lens] = False
    row = MicroBatch(
        input_ids=rng.integers(0, 1000, length, dtype=np.int32),
        loss_mask=in_loss,
        advantages=rng.normal(size=length).astype(np.float32),
        inference_logprobs=-rng.random(length, np.float32),
        temperatures=0.5 + rng.random(length, np.float32),
        seq_lens=lens,
    )
    expected = DeviceBatch.from_numpy(row, torch.device("cpu"))
    with no_waiting():
        found = [DeviceBatch.from_numpy(row, torch.device("cuda")) for _ in range(20)]
    for batch in found:
        for field in fields(DeviceBatch):
            here, there = getattr(expected, field.name), getattr(batch, field.name)
            if isinstance(here, torch.Tensor):
                assert there.is_cuda
                assert torch.equal(here, there.cpu()), field.name
            else:
                assert here == there
