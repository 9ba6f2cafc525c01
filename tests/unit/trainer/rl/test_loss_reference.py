import math

import numpy as np
import pytest
import torch

from prime_rl.config.algorithms import RefKLConfig
from prime_rl.trainer.rl.loss_reference import reference_loss


def distilled(make_streams, probs, old_probs, ref_probs, config=None, dtype=torch.float64, weights=None):
    count = len(probs)
    streams = make_streams(
        *(probs, old_probs),
        ref_probs=ref_probs,
        rl_weights=[0.0] * count,
        ref_kl_weights=weights or [1.0] * count,
        dtype=dtype,
    )
    output = reference_loss(streams, config or RefKLConfig(kl_tau=0))
    output.sums["ref_kl"].backward()
    return output.sums["ref_kl"].item(), streams.logprobs_N.grad.tolist(), output


@pytest.mark.parametrize(
    ("prob", "old_prob", "ref_prob", "loss", "is_masked"),
    [
        (0.5, 0.5, 0.25, math.log(2), 0),  # less likely for the reference: pushed down by log 2
        (0.25, 0.5, 0.5, -math.log(2) / 2, 0),  # ratio 1/2, fell already, pushed up again
        (0.1, 0.5, 0.05, 0, 1),  # fell by 0.4, and would be pushed further
        (0.9, 0.5, 0.95, 0, 1),  # rose by 0.4, and would be pushed further
        (0.9, 0.5, 0.45, 1.8 * math.log(2), 0),  # rose by 0.4, pushed down again
        (0.5, 0.25, 0.5, 0, 0),  # there already
    ],
)
def test_a_token_is_pushed_to_the_reference_unless_it_moved_too_far_that_way(
    make_streams, prob, old_prob, ref_prob, loss, is_masked
):
    config = RefKLConfig(kl_tau=0, mask_high=0.3, mask_low=0.3)
    found, (grad,), output = distilled(make_streams, [prob], [old_prob], [ref_prob], config)
    assert found == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(loss, abs=1e-12)
    assert output.metrics_N["ref_kl_is_masked"].item() == is_masked
    assert output.metrics_N["ref_kl"].item() == pytest.approx(math.log(prob / ref_prob))


def test_the_bounds_are_separate_and_a_masked_token_pays_for_its_distance(make_streams):
    tokens = ([0.1, 0.9], [0.5, 0.5], [0.05, 0.95])
    for config, masked in ((RefKLConfig(mask_low=0.5), [0, 1]), (RefKLConfig(mask_high=0.5), [1, 0])):
        _, _, output = distilled(make_streams, *tokens, config)
        assert output.metrics_N["ref_kl_is_masked"].tolist() == masked
    found, grad, _ = distilled(make_streams, *tokens, RefKLConfig(kl_tau=0.5))
    assert found == pytest.approx(0.5 * (math.log(5) ** 2 + math.log(1.8) ** 2))
    assert grad == pytest.approx([-math.log(5), math.log(1.8)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_agree_with_a_float64_reference(make_streams, dtype, tolerance):
    rng = np.random.default_rng(0)
    probs, old, ref = rng.uniform(0.02, 0.98, (3, 80)).tolist()
    weights = rng.choice([0.0, 0.5, 1.0], 80).tolist()
    config = RefKLConfig(kl_tau=0.05)
    total, slopes = 0.0, []
    for p, m, q, weight in zip(probs, old, ref, weights, strict=True):
        signal, ratio, log_ratio = math.log(q / p), p / m, math.log(p / m)
        is_dropped = p - m > 0.2 if signal > 0 else p - m < -0.2
        push = 0 if is_dropped else -signal * ratio
        total += weight * (push + 0.05 * log_ratio**2)
        slopes.append(weight * (push + 0.1 * log_ratio))
    found, grad, output = distilled(make_streams, probs, old, ref, config, dtype, weights)
    assert found == pytest.approx(total, rel=tolerance)
    assert grad == pytest.approx(slopes, rel=tolerance, abs=tolerance)
    assert output.counted_N["ref_kl"].tolist() == [weight != 0 for weight in weights]
    assert 0 < output.metrics_N["ref_kl_is_masked"].sum() < 80


def test_its_expected_gradient_is_that_of_the_kl_to_the_reference(make_streams):
    """On-policy, summed over a vocabulary of three with the policy's probabilities as weights."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), logits, retain_graph=True)
    probs = logprobs.exp().tolist()
    _, slopes, _ = distilled(make_streams, probs, probs, reference.tolist(), RefKLConfig(), weights=probs)
    (estimate,) = torch.autograd.grad(logprobs, logits, torch.tensor(slopes, dtype=torch.float64))
    assert torch.allclose(estimate, exact)


def test_no_token_gives_zero_and_a_backward_pass(make_streams):
    assert distilled(make_streams, [], [], [])[:2] == (0, [])
    assert distilled(make_streams, [0.5], [1e-30], [0.1], weights=[0.0])[:2] == (0, [0])
