import math
import re

import msgspec
import numpy as np
import pytest
import torch

from prime_rl.data.samples import TrainingBatch
from prime_rl.trainer.diagnosis import (
    first_not_finite,
    of_batch,
    of_entropy,
    of_not_finite,
    of_skipping,
    of_zero_gradient,
)


def with_rows(batch: TrainingBatch, **changes) -> TrainingBatch:
    """The batch with arrays of each row replaced by what a function of the row gives."""
    rows = [
        msgspec.structs.replace(row, **{name: value(row) for name, value in changes.items()})
        for row in batch.micro_batches
    ]
    return msgspec.structs.replace(batch, micro_batches=rows, num_loss_tokens=sum(row.num_loss_tokens for row in rows))


def flat(batch: TrainingBatch) -> TrainingBatch:
    return with_rows(batch, advantages=lambda row: np.zeros_like(row.advantages))


def test_a_batch_with_something_to_learn_is_not_spoken_of(make_batch):
    assert of_batch(make_batch(3)) is None


def test_a_batch_with_nothing_in_the_loss_points_to_the_rollouts(make_batch):
    batch = with_rows(make_batch(3, count=6), loss_mask=lambda row: np.zeros_like(row.loss_mask))
    said = of_batch(batch)
    assert said.startswith(f"step 3: none of the {batch.num_tokens} tokens in 6 sequences is in the loss")
    assert "the orchestrator sent sequences in which nothing was sampled" in said
    assert "rollouts/step_3/rollouts.jsonl" in said


def test_a_batch_without_advantages_points_to_the_rewards(make_batch):
    said = of_batch(flat(make_batch(2)))
    assert said.startswith("step 2: every advantage of the batch is 0")
    assert "batch/zero_variance" in said


def test_advantages_of_tokens_that_are_not_in_the_policy_gradient_do_not_count(make_batch):
    """The prompt's advantages are those of its rollout."""
    batch = with_rows(
        make_batch(2), advantages=lambda row: np.where(row.loss_mask, 0, row.advantages).astype(np.float32)
    )
    assert any(row.advantages.any() for row in batch.micro_batches)
    assert "every advantage" in of_batch(batch)


def test_a_batch_that_other_streams_teach_from_needs_no_advantages(make_batch):
    without = flat(make_batch(2))
    weights = {"ce_weights": lambda row: row.loss_mask.astype(np.float32)}
    assert of_batch(with_rows(without, **weights)) is None
    reference = {"ref_logprobs": lambda row: -row.loss_mask.astype(np.float32)}
    assert of_batch(with_rows(without, **reference)) is None  # a teacher's advantage (loss.teacher_tau)


def test_an_entropy_that_is_nan_is_told_only_then():
    assert of_entropy(4, {"entropy/mean": 0.3}) is None
    assert of_entropy(4, {}) is None
    assert of_entropy(4, {"entropy/mean": math.nan}).startswith("step 4: the entropy of a token is NaN")


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"is_masked/mean": 1.0, "mismatch_kl/mean": 0.25}, r"masked every token .* mismatch_kl/mean 0\.25"),
        ({"is_masked/mean": 0.0, "is_clipped/mean": 1.0}, "clipped the ratio of every token"),
        ({"is_masked/mean": 0.5}, "the loss does not depend on what is trained: a custom loss"),
    ],
)
def test_a_zero_gradient_is_explained_by_what_the_loss_did(make_batch, metrics, reason):
    said = of_zero_gradient(make_batch(1), metrics)
    assert said.startswith("step 1: the gradient is exactly 0")
    assert re.search(reason, said)


def test_a_zero_gradient_of_a_batch_without_advantages_is_explained_by_the_batch(make_batch):
    said = of_zero_gradient(flat(make_batch(1)), {"is_masked/mean": 0.0})
    assert "nothing to come from: every advantage of the batch is 0" in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": "a.weight"}, "weights themselves are not finite, a.weight first: the update of an earlier step"),
        ({"metrics": {"entropy/mean": math.nan}}, "the model's logits are not: the forward pass overflowed"),
        ({"metrics": {"entropy/mean": 1.0, "entropy/max": math.inf}}, "the model's logits are not"),
        ({"metrics": {"mismatch_kl/max": 1e30}}, "overflowed (mismatch_kl/max is 1e+30)"),
        ({"losses": [0.5, 0.25], "grad_norm": math.nan, "gradient": "b.weight"}, "gradient of b.weight first is not"),
        ({"losses": [0.5, 0.25], "grad_norm": math.nan}, "the loss is finite, its gradient is not"),
    ],
)
def test_what_is_not_finite_is_traced_to_the_first_stage_that_is_not(changes, reason):
    facts = {"losses": [0.5, math.nan], "grad_norm": 1.0, "metrics": {}, "weight": None, "gradient": None}
    facts |= {"outcome": of_skipping(1, 0, may_go_on=True)} | changes
    said = of_not_finite(7, **facts)
    if math.isnan(facts["losses"][1]):
        assert said.startswith("step 7: the loss of micro-batch 1 of 2 is nan; training stopped")
    else:
        assert said.startswith("step 7: the gradient norm is nan; training stopped")
    assert reason.lower() in said.lower()


@pytest.mark.parametrize(
    ("num", "limit", "may_go_on", "said"),
    [
        (1, 0, True, "training stopped before these gradients reached the weights"),
        (1, 3, False, "training stopped before these gradients reached the weights"),
        (1, 1, True, "training goes on (1 in a row; after more than max_skipped_steps = 1 it stops)"),
        (4, 3, True, "the updates of the 3 steps before were left out for such a reason, too"),
    ],
)
def test_what_becomes_of_a_step_that_is_not_finite_depends_on_those_before_it(num, limit, may_go_on, said):
    assert of_skipping(num, limit, may_go_on=may_go_on).endswith(said)


def test_weights_that_are_not_finite_at_the_start_came_from_the_model_directory():
    said = of_not_finite(0, losses=[math.nan], grad_norm=0.0, metrics={}, weight="w", gradient=None, outcome="x")
    assert "w first: the model directory holds such values" in said


def test_the_first_tensor_that_is_not_finite_is_named():
    good, spoilt = torch.ones(3), torch.tensor([1.0, math.inf])
    assert first_not_finite([("a", good), ("none", None)]) is None
    assert first_not_finite([("a", good), ("none", None), ("b", spoilt), ("c", spoilt)]) == "b"
