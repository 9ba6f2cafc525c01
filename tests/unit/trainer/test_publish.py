import os

import pytest
import torch

from prime_rl.models.hf import hf_tensors
from prime_rl.trainer.publish import WeightPublisher, removable
from prime_rl.transport.manifest import complete_steps, verify
from prime_rl.transport.weights import read_weights


def publisher(decoder, model_dir, weights_dir, **changes) -> WeightPublisher:
    options = {"dtype": torch.float32, "max_steps": 7, "interval": None, "keep_last": 3, **changes}
    return WeightPublisher(model=decoder, weights_dir=weights_dir, assets=model_dir, tokenizer=model_dir, **options)


@pytest.mark.parametrize(
    ("keep_last", "interval", "gone"),
    [(2, None, [1, 2, 3]), (2, 2, [1, 3]), (5, None, []), (1, 1, [])],
)
def test_steps_outside_the_window_go_unless_they_are_multiples_of_the_interval(keep_last, interval, gone):
    assert removable([1, 2, 3, 4, 5], latest=5, keep_last=keep_last, interval=interval) == gone


def test_rl_publishes_every_step_and_keeps_a_window_the_multiples_and_the_last(decoder, model_dir, tmp_path):
    weights = publisher(decoder, model_dir, tmp_path / "weights", interval=3)
    for step in range(1, 8):
        weights.publish(step)
        assert step in complete_steps(tmp_path / "weights")
    assert complete_steps(tmp_path / "weights") == [3, 5, 6, 7]
    assert sorted(os.listdir(tmp_path / "weights")) == ["step_3", "step_5", "step_6", "step_7"]


def test_sft_publishes_multiples_and_the_last_step_and_removes_nothing(decoder, model_dir, tmp_path):
    weights = publisher(decoder, model_dir, tmp_path / "weights", interval=3, keep_last=None)
    for step in range(1, 8):
        weights.publish(step)
    assert complete_steps(tmp_path / "weights") == [3, 6, 7]


def test_weights_are_published_in_the_dtype_asked_for(decoder, model_dir, tmp_path):
    publisher(decoder, model_dir, tmp_path / "weights", dtype=torch.bfloat16).publish(1)
    read = dict(read_weights(tmp_path / "weights" / "step_1"))
    for name, tensor in hf_tensors(decoder):
        assert torch.equal(read[name], tensor.bfloat16())
    assert "tokenizer.json" in verify(tmp_path / "weights" / "step_1").files
