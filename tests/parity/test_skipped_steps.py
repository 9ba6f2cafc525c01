"""A step whose loss is NaN on one rank alone is left out on all of them, as in one process."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.doubles.ranks import on_ranks
from tests.doubles.training import VOCAB_SIZE, Case, Trained, train_all

from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors
from prime_rl.trainer.ranks import ALONE

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
STEPS = range(3)
SPOILT = 1
TOLERANCE = 1e-5
"""Of the change of all weights, by norm."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": True}))
    write_safetensors(hf_tensors(load_decoder(str(directory), seed=3)), directory)
    return directory


def flat(trained: Trained) -> np.ndarray:
    return np.concatenate([trained.weights[name].ravel() for name in sorted(trained.weights)])


def test_ranks_leave_out_a_step_that_is_not_finite_on_one_of_them(directory):
    alone, before = train_all(
        ALONE,
        [Case(directory=directory, steps=STEPS, spoilt=(SPOILT, 0)), Case(directory=directory, steps=range(0))],
    )
    of_ranks = on_ranks(2, train_all, [Case(directory=directory, steps=STEPS, spoilt=(SPOILT, 1))])
    first, second = (cases[0] for cases in of_ranks)
    assert alone.logged("optim/skipped") == first.logged("optim/skipped") == [0, 1, 0]
    assert np.array_equal(flat(first), flat(second))
    change = flat(alone) - flat(before)
    assert np.isfinite(change).all()
    assert np.linalg.norm(change) > 0
    assert np.linalg.norm(flat(first) - flat(alone)) < TOLERANCE * np.linalg.norm(change)
