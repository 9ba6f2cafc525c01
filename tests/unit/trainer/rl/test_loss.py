import json
import math
from pathlib import Path

import pytest
import torch

from prime_rl.config.algorithms import CISPOLossConfig, GRPOLossConfig, LossConfig, RefKLConfig
from prime_rl.trainer.rl.loss import build_loss

GOLDEN = Path(__file__).parents[3] / "assets" / "rl_loss.json"


def test_each_token_goes_into_the_streams_that_weigh_it(make_streams):
    streams = make_streams(
        *([0.5, 0.25, 0.2, 0.5], [0.5, 1.0, 0.4, 0.5], [2.0, 9.0, 9.0, -1.0]),
        ref_probs=[1.0, 1.0, 0.4, 0.25],
        rl_weights=[1.0, 0.0, 0.0, 0.5],
        ce_weights=[0.0, 0.1, 0.0, 1.0],  # the last token is in all three
        ref_kl_weights=[0.0, 0.0, 1.0, 2.0],
        dtype=torch.float64,
    )
    output = build_loss(LossConfig(), RefKLConfig(kl_tau=0))(streams)
    ln2 = math.log(2)
    assert output.sums["rl"].item() == pytest.approx(-2 + 0.5)
    assert output.sums["ce"].item() == pytest.approx(0.1 * 2 * ln2 + ln2)
    assert output.sums["ref_kl"].item() == pytest.approx(-0.5 * ln2 + 2 * ln2)
    sum(output.sums.values()).backward()
    assert streams.logprobs_N.grad.tolist() == pytest.approx([-2, -0.1, -0.5 * ln2, 0.5 - 1 + 2 * ln2])
    counted = {name: mask.int().tolist() for name, mask in output.counted_N.items()}
    assert counted["mismatch_kl"] == [1, 0, 1, 1]
    assert counted["nll"] == [0, 1, 0, 1]
    assert counted["importance_ratio"] == counted["is_masked"] == [1, 0, 0, 1]
    assert counted["ref_kl"] == [0, 0, 1, 1]
    assert "entropy" not in counted  # that of every token
    assert output.metrics_N["nll"].tolist() == pytest.approx([ln2, 2 * ln2, math.log(5), ln2])


def test_cross_entropy_has_the_values_that_its_weights_give(make_streams):
    """-0.1 and -0.2 in the stream, -0.5 outside: 0.3, of which a trainer with 2 tokens makes 0.15."""
    probs = [math.exp(-0.1), math.exp(-0.5), math.exp(-0.2)]
    loss = build_loss(LossConfig())
    assert loss(make_streams(probs, ce_weights=[1.0, 0.0, 1.0])).sums["ce"].item() / 2 == pytest.approx(0.15)
    assert loss(make_streams(probs, ce_weights=[0.1, 0.0, 0.1])).sums["ce"].item() == pytest.approx(0.03)


def test_streams_that_overlap_add_up(make_streams):
    probs, ref = [0.4, 0.3], [0.2, 0.6]
    weights = {"ce_weights": [0.5, 1.0], "ref_kl_weights": [1.0, 1.0], "ref_probs": ref, "advantages": [1.0, -2.0]}
    none = [0.0, 0.0]
    loss = build_loss(GRPOLossConfig())

    def slopes(**without):
        streams = make_streams(probs, [0.3, 0.3], dtype=torch.float64, **{**weights, **without})
        sum(loss(streams).sums.values()).backward()
        return streams.logprobs_N.grad

    alone = [
        slopes(ce_weights=none, ref_kl_weights=none),
        slopes(rl_weights=none, ref_kl_weights=none),
        slopes(rl_weights=none, ce_weights=none),
    ]
    assert torch.allclose(slopes(), sum(alone), atol=1e-12)


def test_mismatch_is_the_estimate_of_the_kl_of_the_sampled_tokens(make_streams):
    output = build_loss(CISPOLossConfig())(make_streams([0.2, 0.5], [0.1, 0.5], [3.0, 1.0]))
    assert output.metrics_N["mismatch_kl"].tolist() == pytest.approx([2 - math.log(2) - 1, 0])


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_golden_values_hold(make_streams, case):
    streams = make_streams(case["probs"], case["old_probs"], case["advantages"], dtype=torch.float64)
    output = build_loss(LossConfig(**case["config"]))(streams)
    assert output.sums["rl"].item() == pytest.approx(case["loss_sum"], rel=1e-9)
    assert output.metrics_N["mismatch_kl"].mean().item() == pytest.approx(case["mismatch_kl_mean"], rel=1e-9)


def test_a_row_with_nothing_in_the_loss_still_runs_backward(make_streams):
    streams = make_streams([])
    sums = build_loss(LossConfig())(streams).sums
    assert {name: total.item() for name, total in sums.items()} == {"rl": 0, "ce": 0}
    sum(sums.values()).backward()
    assert streams.logprobs_N.grad.shape == (0,)


@pytest.mark.parametrize(("key", "value"), [("mask_low", 0.9), ("mask_high", 0.9), ("kl_tau", 0.5)])
def test_every_key_of_ref_kl_changes_its_stream(make_streams, key, value):
    sums = []
    for config in (RefKLConfig(), RefKLConfig(**{key: value})):
        streams = make_streams(
            [0.1, 0.9], [0.5, 0.5], ref_probs=[0.05, 0.95], rl_weights=[0.0, 0.0], ref_kl_weights=[1.0, 1.0]
        )
        sums.append(build_loss(LossConfig(), config)(streams).sums["ref_kl"].item())
    assert sums[0] != pytest.approx(sums[1])
