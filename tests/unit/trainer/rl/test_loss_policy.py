import dataclasses
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from prime_rl.config.algorithms import (
    CISPOLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    IPOLossConfig,
    LossConfig,
    PPOClipLossConfig,
)
from prime_rl.errors import DataError
from prime_rl.trainer.rl.loss_policy import policy_loss

TYPES = (LossConfig, IPOLossConfig, GRPOLossConfig, PPOClipLossConfig, GSPOLossConfig, CISPOLossConfig)


def loss_and_slopes(streams, config):
    output = policy_loss(streams, config)
    output.sums["rl"].backward()
    return output.sums["rl"].item(), streams.logprobs_N.grad.tolist(), output


# a reference in Python floats, which are float64, token by token, with gradients by hand


def trust_region_drops(config, advantage, change):
    if config.type == "ipo":
        return abs(change) > config.ipo_threshold
    return change > config.dppo_mask_high if advantage > 0 else change < -config.dppo_mask_low


def reference_token(config, advantage, logprob, log_ratio, change, sequence):
    """l of a token, and its derivative by the token's logprob."""
    ratio = math.exp(min(log_ratio, 20))
    if config.type in ("default", "ipo"):
        if trust_region_drops(config, advantage, change):
            return 0.0, 0.0
        weight = ratio
        if config.ratio_type == "sequence":
            weight = min(math.exp(min(sum(sequence), 20)), config.sequence_clip_high or math.inf)
        elif config.tis_cap is not None:
            weight = min(ratio, config.tis_cap)
        return -advantage * weight, -advantage * weight
    if config.type == "cispo":
        weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        return -advantage * weight * logprob, -advantage * weight
    if config.type == "grpo":
        return -advantage * min(ratio, config.clip_ratio), -advantage * ratio * (ratio <= config.clip_ratio)
    if config.type == "gspo":
        ratio = math.exp(sum(sequence) / len(sequence))
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and config.clip_ratio is not None:
        surrogate = max(surrogate, config.clip_ratio * advantage)
    return -surrogate, -advantage * ratio * (surrogate == ratio * advantage)


def reference(streams, config):
    """The sum and its derivatives by every logprob."""
    new, old = streams.logprobs_N.tolist(), streams.inference_logprobs_N.tolist()
    weights, sequence_of = streams.rl_weights_N.tolist(), streams.sequence_N.tolist()
    log_ratios = [a - b for a, b in zip(new, old, strict=True)]
    sequences = defaultdict(list)
    for index, weight in enumerate(weights):
        if weight:
            sequences[sequence_of[index]].append(log_ratios[index])
    total, slopes = 0.0, []
    for index, weight in enumerate(weights):
        if not weight or left_out(log_ratios[index], sequences[sequence_of[index]], config):
            slopes.append(0.0)
            continue
        advantage = config.adv_tau * streams.advantages_N[index].item()
        if config.teacher_tau:
            advantage += config.teacher_tau * (streams.ref_logprobs_N[index].item() - new[index])
        change = math.exp(new[index]) - math.exp(old[index])
        sequence = sequences[sequence_of[index]]
        value, slope = reference_token(config, advantage, new[index], log_ratios[index], change, sequence)
        total += weight * (value + config.kl_tau * log_ratios[index] ** 2)
        slopes.append(weight * (slope + 2 * config.kl_tau * log_ratios[index]))
    return total, slopes


def left_out(log_ratio, sequence, config):
    inf, ratios = math.inf, [math.exp(value) for value in sequence]
    geo = math.exp(sum(sequence) / len(sequence))

    def outside(smallest, largest, low, high):
        return smallest < (low or 0) or largest > (inf if high is None else high)

    return (
        outside(math.exp(log_ratio), math.exp(log_ratio), config.token_mask_low, config.token_mask_high)
        or outside(geo, geo, config.geo_mask_low, config.geo_mask_high)
        or outside(min(ratios), max(ratios), config.sequence_mask_low, config.sequence_mask_high)
    )


def random_streams(make_streams, seed, dtype):
    """60 tokens of 6 sequences, some of them outside the stream, with ratios around 1."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(0.05, 0.9, 60)
    new = np.clip(old * np.exp(rng.normal(scale=0.6, size=60)), 1e-3, 0.99)
    return make_streams(
        new.tolist(),
        old.tolist(),
        rng.normal(size=60).tolist(),
        dtype=dtype,
        ref_probs=rng.uniform(0.05, 0.95, 60).tolist(),
        rl_weights=rng.choice([0.0, 0.5, 1.0], 60, p=[0.2, 0.2, 0.6]).tolist(),
        sequence=np.sort(rng.integers(0, 6, 60)).tolist(),
    )


CONFIGS = {
    "default": LossConfig(kl_tau=0.05, adv_tau=0.7),
    "default, teacher": LossConfig(teacher_tau=0.5),
    "default, tis": LossConfig(tis_cap=1.3),
    "default, sequence": LossConfig(ratio_type="sequence", sequence_clip_high=1.5),
    "default, sequence, no bound": LossConfig(ratio_type="sequence"),
    "default, icepop": LossConfig(token_mask_low=0.5, token_mask_high=2.0),
    "ipo": IPOLossConfig(kl_tau=0.02),
    "ipo, tis": IPOLossConfig(tis_cap=1.1, ipo_threshold=0.15),
    "grpo": GRPOLossConfig(clip_ratio=1.4, kl_tau=0.01),
    "grpo, icepop": GRPOLossConfig(token_mask_low=0.6, token_mask_high=1.6),
    "ppo_clip": PPOClipLossConfig(clip_ratio=1.7),
    "ppo_clip, one bound": PPOClipLossConfig(clip_ratio=None, clip_high=0.28, kl_tau=0.1),
    "gspo": GSPOLossConfig(clip_low=0.05, clip_high=0.1),
    "gspo, dual clip": GSPOLossConfig(clip_low=0.02, clip_high=0.01, clip_ratio=1.05, teacher_tau=0.3),
    "cispo": CISPOLossConfig(),
    "cispo, both bounds": CISPOLossConfig(clip_low=0.2, clip_high=0.3),
    "geo": CISPOLossConfig(geo_mask_low=0.95, geo_mask_high=1.2),
    "sequence": GRPOLossConfig(sequence_mask_low=0.3, sequence_mask_high=3.0),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_loss_and_its_gradient_agree_with_a_float64_reference(make_streams, config):
    for seed in range(3):
        expected, slopes = reference(random_streams(make_streams, seed, torch.float64), config)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            found, grad, output = loss_and_slopes(random_streams(make_streams, seed, dtype), config)
            assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
            assert grad == pytest.approx(slopes, rel=tolerance, abs=tolerance)
        assert [value for value, slope in zip(grad, slopes, strict=True) if slope == 0 and value != 0] == []
        assert all(len(values) == 60 for values in output.metrics_N.values())


@pytest.mark.parametrize("config", [CONFIGS["default, tis"], CONFIGS["grpo"], CONFIGS["ppo_clip"], CONFIGS["gspo"]])
def test_the_reference_cases_clip_some_tokens_and_not_others(make_streams, config):
    output = policy_loss(random_streams(make_streams, 0, torch.float32), config)
    clipped = output.metrics_N["is_clipped"][output.counted_N["is_clipped"]]
    assert 0 < clipped.sum() < len(clipped)


# by hand


def case(config, prob, old_prob, advantage, loss, slope):
    return pytest.param(
        config, prob, old_prob, advantage, loss, slope, id=f"{config.type} {prob} {old_prob} {advantage}"
    )


PPO = PPOClipLossConfig()


@pytest.mark.parametrize(
    ("config", "prob", "old_prob", "advantage", "loss", "slope"),
    [
        case(LossConfig(kl_tau=0), 0.2, 0.1, 3, -6, -6),
        case(LossConfig(kl_tau=0, tis_cap=1.5), 0.2, 0.1, 3, -4.5, -4.5),  # at the cap the gradient stays
        case(LossConfig(kl_tau=0.5), 0.9, 0.1, 1, 0.5 * math.log(9) ** 2, math.log(9)),  # dropped, and pays for its way
        case(IPOLossConfig(kl_tau=0), 0.35, 0.25, 1, -1.4, -1.4),
        case(IPOLossConfig(kl_tau=0), 0.4, 0.25, 1, 0, 0),  # rose by 0.15
        case(IPOLossConfig(kl_tau=0), 0.4, 0.25, -1, 0, 0),  # whichever way it is pushed
        case(IPOLossConfig(kl_tau=0), 0.1, 0.25, 1, 0, 0),  # fell by 0.15
        case(GRPOLossConfig(), 0.4, 0.1, 2, -8, -8),
        case(GRPOLossConfig(clip_ratio=3), 0.4, 0.1, 2, -6, 0),
        case(GRPOLossConfig(clip_ratio=3), 0.4, 0.1, -2, 6, 0),
        case(PPO, 0.3, 0.2, 1, -1.2, 0),
        case(PPO, 0.3, 0.2, -1, 1.5, 1.5),
        case(PPO, 0.1, 0.2, 1, -0.5, -0.5),
        case(PPO, 0.1, 0.2, -1, 0.8, 0),
        case(PPO, 0.5, 0.1, -1, 4, 0),  # the second clip
        case(PPOClipLossConfig(clip_ratio=None), 0.5, 0.1, -1, 5, 5),
        case(PPOClipLossConfig(clip_high=0.6), 0.3, 0.2, 1, -1.5, -1.5),
        case(CISPOLossConfig(clip_high=1), 0.4, 0.1, 2, -4 * math.log(0.4), -4),
        case(CISPOLossConfig(), 0.1, 0.4, -2, 0.5 * math.log(0.1), 0.5),
        case(CISPOLossConfig(clip_low=0.2), 0.1, 0.4, -2, 1.6 * math.log(0.1), 1.6),
        case(GSPOLossConfig(clip_high=2), 0.4, 0.2, 1, -2, -2),
        case(GSPOLossConfig(), 0.4, 0.2, 1, -1.0004, 0),
        case(GSPOLossConfig(), 0.1, 0.2, -1, 0.9997, 0),
        case(GRPOLossConfig(adv_tau=0.5, kl_tau=1), 0.4, 0.2, 2, -2 + math.log(2) ** 2, -2 + 2 * math.log(2)),
    ],
)
def test_a_token_has_the_loss_and_the_gradient_that_the_formula_gives(
    make_streams, config, prob, old_prob, advantage, loss, slope
):
    found, (grad,), _ = loss_and_slopes(make_streams([prob], [old_prob], [advantage], dtype=torch.float64), config)
    assert found == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert grad == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_gspo_takes_the_geometric_mean_of_the_tokens_of_the_stream_alone(make_streams):
    config = GSPOLossConfig(clip_high=10, clip_low=1)
    streams = make_streams(
        *([0.2, 0.9, 0.8, 0.3], [0.1, 0.1, 0.1, 0.3], [1.0, 1.0, 1.0, -2.0]),
        rl_weights=[1.0, 0.0, 1.0, 1.0],
        sequence=[0, 0, 0, 1],
        dtype=torch.float64,
    )
    found, grad, _ = loss_and_slopes(streams, config)
    mean = math.sqrt(2 * 8)  # the token between them is in another stream
    assert found == pytest.approx(-2 * mean + 2)
    assert grad == pytest.approx([-mean, 0, -mean, 2])


def test_a_sequence_ratio_is_the_product_of_its_tokens(make_streams):
    streams = make_streams([0.2, 0.3, 0.4], [0.1, 0.2, 0.4], [1.0, 1.0, 5.0], sequence=[0, 0, 1], dtype=torch.float64)
    found, grad, _ = loss_and_slopes(streams, LossConfig(kl_tau=0, ratio_type="sequence"))
    assert found == pytest.approx(-2 * 3 - 5)
    assert grad == pytest.approx([-3, -3, -5])


@pytest.mark.parametrize("config_type", TYPES, ids=lambda config_type: config_type.__name__)
def test_on_policy_every_loss_has_the_plain_policy_gradient(make_streams, config_type):
    """Where the policy is still the one that sampled, r is 1 and all of them push alike."""
    streams = make_streams([0.5, 0.25, 0.1], advantages=[2.0, -1.0, 0.5], sequence=[0, 0, 1])
    _, grad, output = loss_and_slopes(streams, config_type())
    assert grad == pytest.approx([-2, 1, -0.5])
    assert output.metrics_N["importance_ratio"].tolist() == [1, 1, 1]
    assert output.metrics_N["is_masked"].tolist() == [0, 0, 0]


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
def test_the_default_drops_a_token_whose_probability_moved_too_far_the_way_it_is_pushed(
    make_streams, prob, old_prob, advantage, is_masked
):
    streams = make_streams([prob], [old_prob], [advantage])
    found, (grad,), output = loss_and_slopes(streams, LossConfig(kl_tau=0))
    assert output.metrics_N["is_masked"].item() == is_masked
    expected = 0.0 if is_masked else -advantage * prob / old_prob
    assert found == pytest.approx(expected, rel=1e-5)
    assert grad == pytest.approx(expected, rel=1e-5)


def test_the_two_thresholds_of_the_default_are_separate(make_streams):
    config = LossConfig(dppo_mask_high=0.3, dppo_mask_low=0.1)
    output = policy_loss(make_streams([0.75, 0.35], [0.5, 0.5], [1.0, -1.0]), config)
    assert output.metrics_N["is_masked"].tolist() == [0, 1]


# masks, extremes, nothing at all


def test_a_mask_takes_a_token_out_altogether_and_leaves_the_others_as_they_are(make_streams):
    probs, old_probs = [0.9, 0.2, 0.3], [0.1, 0.1, 0.3]  # ratios 9, 2, 1
    config = CISPOLossConfig(token_mask_low=0.5, token_mask_high=5.0, kl_tau=0.5)
    found, grad, output = loss_and_slopes(make_streams(probs, old_probs, [1.0, 1.0, 1.0]), config)
    alone, slopes, _ = loss_and_slopes(make_streams(probs[1:], old_probs[1:], [1.0, 1.0]), config)
    assert grad[0] == 0  # nor does it pay for its distance
    assert found == pytest.approx(alone)
    assert grad[1:] == pytest.approx(slopes)
    assert output.metrics_N["token_masked"].tolist() == [1, 0, 0]
    assert output.metrics_N["is_masked"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("config_type", TYPES, ids=lambda config_type: config_type.__name__)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("logprob", "old_logprob"), [(-0.1, -3000.0), (-3000.0, -0.1), (0.0, -88.0), (-0.1, -60.0)])
def test_no_probability_makes_a_loss_or_a_gradient_that_is_not_finite(
    make_streams, config_type, advantage, logprob, old_logprob
):
    streams = make_streams([0.5, 0.5], advantages=[advantage, advantage])
    streams = dataclasses.replace(
        streams,
        logprobs_N=torch.tensor([logprob, -1.0], requires_grad=True),
        inference_logprobs_N=torch.tensor([old_logprob, -1.0]),
    )
    found, grad, output = loss_and_slopes(streams, config_type(kl_tau=0.001))
    assert math.isfinite(found)
    assert np.isfinite(grad).all()
    assert sum(value**2 for value in grad) < 1e30  # the square of a norm has room in float32
    assert all(values.isfinite().all() for values in output.metrics_N.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_token_and_no_token_of_the_stream_give_zero_and_a_backward_pass(make_streams, config):
    found, grad, _ = loss_and_slopes(make_streams([], ref_probs=[]), config)
    assert (found, grad) == (0, [])
    others = make_streams([0.5, 1e-30], [1.0, 1.0], [3.0, 1.0], rl_weights=[0.0, 0.0], ref_probs=[0.1, 0.1])
    found, grad, output = loss_and_slopes(others, config)
    assert (found, grad) == (0, [0, 0])
    assert not torch.stack(list(output.counted_N.values())).any()


def test_weights_scale_tokens(make_streams):
    _, whole, _ = loss_and_slopes(make_streams([0.2, 0.3], [0.1, 0.3], [1.0, 2.0]), LossConfig())
    _, scaled, _ = loss_and_slopes(
        make_streams([0.2, 0.3], [0.1, 0.3], [1.0, 2.0], rl_weights=[0.25, 3.0]), LossConfig()
    )
    assert scaled == pytest.approx([0.25 * whole[0], 3 * whole[1]])


def test_a_teacher_moves_the_advantage_towards_itself(make_streams):
    streams = make_streams([0.5], advantages=[1.0], ref_probs=[0.25], dtype=torch.float64)
    found, grad, output = loss_and_slopes(streams, GRPOLossConfig(teacher_tau=2.0))
    assert found == pytest.approx(-(1 - 2 * math.log(2)))
    assert grad == pytest.approx([-(1 - 2 * math.log(2))])
    assert output.metrics_N["teacher_kl"].item() == pytest.approx(math.log(2))


def test_a_teacher_that_is_not_there_is_missed_in_words(make_streams):
    with pytest.raises(DataError, match=r"loss.teacher_tau is 0.5, but a micro-batch has no logprobs of a teacher"):
        policy_loss(make_streams([0.5], advantages=[1.0]), LossConfig(teacher_tau=0.5))
    policy_loss(make_streams([], advantages=[]), LossConfig(teacher_tau=0.5))  # a dummy row has no need of one


@pytest.mark.parametrize(
    ("config_type", "key", "value", "beside"),
    [
        *((config_type, "adv_tau", 0.3, {}) for config_type in TYPES),
        *((config_type, "kl_tau", 0.7, {}) for config_type in TYPES),
        *((config_type, "teacher_tau", 0.7, {}) for config_type in TYPES),
        *((config_type, "token_mask_low", 0.8, {}) for config_type in TYPES),
        *((config_type, "token_mask_high", 1.2, {}) for config_type in TYPES),
        *((config_type, "geo_mask_low", 1.0, {}) for config_type in TYPES),
        *((config_type, "geo_mask_high", 1.0, {}) for config_type in TYPES),
        *((config_type, "sequence_mask_low", 0.8, {}) for config_type in TYPES),
        *((config_type, "sequence_mask_high", 1.2, {}) for config_type in TYPES),
        *((config_type, "ratio_type", "sequence", {}) for config_type in (LossConfig, IPOLossConfig)),
        *((config_type, "tis_cap", 1.1, {}) for config_type in (LossConfig, IPOLossConfig)),
        *(
            (config_type, "sequence_clip_high", 0.5, {"ratio_type": "sequence"})
            for config_type in (LossConfig, IPOLossConfig)
        ),
        (LossConfig, "dppo_mask_low", 0.0, {}),
        (LossConfig, "dppo_mask_high", 0.0, {}),
        (IPOLossConfig, "ipo_threshold", 0.5, {}),
        (GRPOLossConfig, "clip_ratio", 1.1, {}),
        (PPOClipLossConfig, "clip_ratio", 1.3, {}),
        (GSPOLossConfig, "clip_ratio", 1.001, {}),
        *((config_type, "clip_low", 0.1, {}) for config_type in (PPOClipLossConfig, GSPOLossConfig, CISPOLossConfig)),
        *((config_type, "clip_high", 0.1, {}) for config_type in (PPOClipLossConfig, GSPOLossConfig, CISPOLossConfig)),
    ],
)
def test_every_key_of_a_loss_changes_it(make_streams, config_type, key, value, beside):
    losses = [
        policy_loss(random_streams(make_streams, 1, torch.float64), config_type(**beside, **keys)).sums["rl"].item()
        for keys in ({}, {key: value})
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-9)
