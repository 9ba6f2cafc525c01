import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from prime_rl.config.trainer import LossConfig
from prime_rl.trainer.rl.loss import build_loss, default_loss
from prime_rl.trainer.streams import TokenStreams

GOLDEN = Path(__file__).parents[3] / "assets" / "rl_loss.json"


def streams(probs, old_probs, advantages, dtype=torch.float32) -> TokenStreams:
    """One sequence, all of it in the rl stream alone."""
    return token_streams(
        torch.tensor(probs, dtype=dtype).log().requires_grad_(),
        torch.tensor(old_probs, dtype=dtype).log(),
        torch.tensor(advantages, dtype=dtype),
    )


def token_streams(logprobs_N, inference_logprobs_N, advantages_N) -> TokenStreams:
    return TokenStreams(
        logprobs_N=logprobs_N,
        entropies_N=torch.full_like(advantages_N, 0.5),
        inference_logprobs_N=inference_logprobs_N,
        advantages_N=advantages_N,
        ref_logprobs_N=None,
        rl_weights_N=torch.ones_like(advantages_N),
        ce_weights_N=torch.zeros_like(advantages_N),
        ref_kl_weights_N=torch.zeros_like(advantages_N),
        sequence_N=torch.zeros(len(advantages_N), dtype=torch.int64),
        num_sequences=1,
    )


def reference(logprobs, old_logprobs, advantages, config: LossConfig) -> float:
    """The formula token by token in Python floats, which are float64."""
    total = 0.0
    for new, old, advantage in zip(logprobs, old_logprobs, advantages, strict=True):
        delta = math.exp(new) - math.exp(old)
        too_high = advantage > 0 and delta > config.dppo_mask_high
        too_low = advantage <= 0 and delta < -config.dppo_mask_low
        if not (too_high or too_low):
            total -= config.adv_tau * advantage * math.exp(new - old)
        total += config.kl_tau * (new - old) ** 2
    return total


def test_on_policy_tokens_give_minus_the_advantages():
    output = default_loss(streams([0.5, 0.25], [0.5, 0.25], [2.0, -1.0]), LossConfig())
    assert output.sums["rl"].item() == pytest.approx(-1.0)
    assert output.metrics_N["mismatch_kl"].tolist() == [0, 0]
    assert output.metrics_N["is_masked"].tolist() == [0, 0]
    assert output.metrics_N["entropy"].tolist() == [0.5, 0.5]


def test_a_ratio_of_two_doubles_the_gradient_and_pays_for_the_distance():
    output = default_loss(streams([0.2], [0.1], [3.0]), LossConfig(kl_tau=0.5, adv_tau=0.1))
    assert output.sums["rl"].item() == pytest.approx(-0.1 * 3 * 2 + 0.5 * math.log(2) ** 2)
    assert output.metrics_N["mismatch_kl"].item() == pytest.approx(2 - math.log(2) - 1)


@pytest.mark.parametrize(
    ("prob", "old_prob", "advantage", "is_masked"),
    [
        (0.75, 0.5, 1.0, True),  # rose by 0.25, pushed up further
        (0.65, 0.5, 1.0, False),  # rose by 0.15
        (0.75, 0.5, -1.0, False),  # rose, pushed back down
        (0.25, 0.5, -1.0, True),  # fell by 0.25, pushed down further
        (0.25, 0.5, 0.0, True),  # advantage 0 counts as not positive
        (0.25, 0.5, 1.0, False),  # fell, pushed back up
        (0.35, 0.5, -1.0, False),  # fell by 0.15
        (1e-3, 1e-6, 1.0, False),  # a ratio of 1000 is no reason: the probability hardly moved
    ],
)
def test_a_token_is_masked_when_its_probability_moved_too_far_the_way_it_is_pushed(
    prob, old_prob, advantage, is_masked
):
    given = streams([prob], [old_prob], [advantage])
    output = default_loss(given, LossConfig(kl_tau=0))
    output.sums["rl"].backward()
    assert output.metrics_N["is_masked"].item() == is_masked
    expected = 0.0 if is_masked else -advantage * prob / old_prob
    assert output.sums["rl"].item() == pytest.approx(expected, rel=1e-5)
    assert given.logprobs_N.grad.item() == pytest.approx(expected, rel=1e-5)


def test_the_two_thresholds_are_separate():
    config = LossConfig(dppo_mask_high=0.3, dppo_mask_low=0.1)
    output = default_loss(streams([0.75, 0.35], [0.5, 0.5], [1.0, -1.0]), config)
    assert output.metrics_N["is_masked"].tolist() == [0, 1]


def test_a_masked_token_still_pays_for_its_distance():
    given = streams([0.9], [0.1], [1.0])
    default_loss(given, LossConfig(kl_tau=0.5)).sums["rl"].backward()
    assert given.logprobs_N.grad.item() == pytest.approx(2 * 0.5 * math.log(9), rel=1e-5)


def test_a_masked_token_whose_ratio_overflows_spoils_nothing():
    given = token_streams(torch.tensor([-0.1], requires_grad=True), torch.tensor([-200.0]), torch.ones(1))
    output = default_loss(given, LossConfig())
    output.sums["rl"].backward()
    assert torch.isfinite(output.sums["rl"])
    assert torch.isfinite(given.logprobs_N.grad).all()


def test_no_tokens_give_zero():
    output = default_loss(streams([], [], []), LossConfig())
    output.sums["rl"].backward()
    assert output.sums["rl"].item() == 0


def test_loss_and_gradient_agree_with_a_float64_reference():
    rng = np.random.default_rng(0)
    config = LossConfig(kl_tau=0.05, adv_tau=0.7)
    probs, old_probs, advantages = rng.random(200), rng.random(200), rng.normal(size=200)
    given = streams(probs, old_probs, advantages)
    output = build_loss(config)(given)
    output.sums["rl"].backward()
    logprobs, old_logprobs = np.log(probs), np.log(old_probs)
    expected = reference(logprobs, old_logprobs, advantages, config)
    assert output.sums["rl"].item() == pytest.approx(expected, rel=1e-5)
    assert 20 < output.metrics_N["is_masked"].sum() < 180
    step = 1e-6
    for index in range(0, 200, 10):
        up, down = logprobs.copy(), logprobs.copy()
        up[index] += step
        down[index] -= step
        slope = (
            reference(up, old_logprobs, advantages, config) - reference(down, old_logprobs, advantages, config)
        ) / (2 * step)
        assert given.logprobs_N.grad[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-3)


def test_autograd_agrees_with_finite_differences_in_float64():
    rng = np.random.default_rng(1)
    given = streams(rng.random(30), rng.random(30), rng.normal(size=30), dtype=torch.float64)

    def loss(logprobs_N):
        moved = token_streams(logprobs_N, given.inference_logprobs_N, given.advantages_N)
        return default_loss(moved, LossConfig()).sums["rl"]

    assert torch.autograd.gradcheck(loss, (given.logprobs_N,))


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_golden_values_hold(case):
    given = streams(case["probs"], case["old_probs"], case["advantages"], dtype=torch.float64)
    output = default_loss(given, LossConfig(**case["config"]))
    assert output.sums["rl"].item() == pytest.approx(case["loss_sum"], rel=1e-9)
    assert output.metrics_N["mismatch_kl"].mean().item() == pytest.approx(case["mismatch_kl_mean"], rel=1e-9)
    assert output.metrics_N["is_masked"].tolist() == case["is_masked"]
