"""Packed rows give the loss and gradients of sequences computed one by one."""

import math

import msgspec
import numpy as np
import pytest
import torch

from prime_rl.config.algorithms import GSPOLossConfig, IPOLossConfig, LossConfig, PolicyLossConfig
from prime_rl.data.balance import CostModel
from prime_rl.data.packing import build_batch, deal
from prime_rl.data.samples import NOT_SAMPLED, TrainingBatch, TrainingSample
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import empty_decoder, initial_tensors, load_hf_tensors
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.trainer import BatchLoss, accumulate_gradients

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def build(model_type: str) -> Decoder:
    model = empty_decoder(
        DecoderConfig.from_hf({**SHAPE, "model_type": model_type, "head_dim": 8}), device="cpu", dtype=torch.float32
    )
    load_hf_tensors(model, initial_tensors(model.config, seed=0))
    return model


def sample(rng: np.random.Generator, length: int) -> TrainingSample:
    sampled = np.arange(length) >= int(rng.integers(1, length))
    return TrainingSample(
        token_ids=rng.integers(0, 97, length).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -3 * rng.random(length), 0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        temperature=float(0.5 + rng.random()),
        advantage=float(rng.normal()),
        reward=0.0,
        env_name="e",
        rollout_id="r",
    )


def run(
    model: Decoder, batch: TrainingBatch, loss: PolicyLossConfig | None = None
) -> tuple[BatchLoss, dict[str, torch.Tensor]]:
    model.zero_grad()
    function = build_loss(loss or LossConfig(kl_tau=0.1))
    result = accumulate_gradients(ComputeModel(Scorer(model), torch.float32), function, batch)
    return result, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model_type", "loss"),
    [
        ("llama", None),
        ("qwen2", None),
        ("qwen3", None),
        ("qwen3", GSPOLossConfig(clip_low=0.9, clip_high=0.5, kl_tau=0.1)),
        ("qwen3", IPOLossConfig(ratio_type="sequence", ipo_threshold=1.0, geo_mask_low=0.02, sequence_mask_high=0.25)),
    ],
)
def test_a_packed_row_equals_its_sequences_alone(model_type, loss):
    rng = np.random.default_rng(0)
    samples = [sample(rng, length) for length in (31, 2, 17, 16, 9, 30, 3)]
    packed = build_batch(samples, step=0, seq_len=108)
    alone = build_batch(samples, step=0, seq_len=31)
    single_rows = [build_batch([item], step=0, seq_len=31).micro_batches[0] for item in samples]
    alone = TrainingBatch(
        step=0,
        micro_batches=single_rows,
        num_loss_tokens=alone.num_loss_tokens,
        min_version=0,
        max_version=0,
    )
    assert [len(row.seq_lens) for row in packed.micro_batches] == [7]
    model = build(model_type)
    expected, expected_gradients = run(model, alone, loss)
    found, found_gradients = run(model, packed, loss)
    assert found.per_micro_batch[0] == pytest.approx(math.fsum(expected.per_micro_batch), rel=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for name, gradient in expected_gradients.items():
        largest = float(gradient.abs().max())
        assert torch.allclose(found_gradients[name], gradient, rtol=0, atol=1e-5 * largest), name


@pytest.mark.parametrize(("num_ranks", "num_dummies"), [(2, 0), (8, 1)])
def test_what_ranks_are_dealt_adds_up_to_the_batch(num_ranks, num_dummies):
    """All three streams, each divided by its tokens of the whole batch, wherever these lie."""
    rng = np.random.default_rng(0)
    samples = [sample(rng, length) for length in (31, 2, 17, 16, 9, 30)]
    mask = np.arange(3) > 0
    samples.append(
        msgspec.structs.replace(
            sample(rng, 3),
            loss_mask=mask,
            logprobs=np.array([0, -0.5, -0.5], np.float32),
            versions=np.array([-1, 0, 0], np.int32),
            rl_weights=np.array([0, 0, 0.5], np.float32),
            ce_weights=0.1 * mask.astype(np.float32),
            ref_kl_weights=mask.astype(np.float32),
            ref_logprobs=-mask.astype(np.float32),
        )
    )
    batch = build_batch(samples, step=0, seq_len=60)
    dealt = deal(batch, num_ranks, 60, CostModel(linear=1.0, quadratic=0.1))
    assert dealt.metrics["balance/dummies"] == num_dummies
    model = build("qwen3")
    expected, expected_gradients = run(model, batch)
    model.zero_grad()
    function, compute = build_loss(LossConfig(kl_tau=0.1)), ComputeModel(Scorer(model), torch.float32)
    found = [accumulate_gradients(compute, function, batch, rows=rows) for rows in dealt.rows]
    total = math.fsum(loss for of_rank in found for loss in of_rank.per_micro_batch)
    assert total == pytest.approx(math.fsum(expected.per_micro_batch), rel=1e-5)
    for name, gradient in expected_gradients.items():
        found_gradient = model.get_parameter(name).grad
        assert torch.allclose(found_gradient, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max())), name


def test_what_stands_beside_a_sequence_does_not_reach_it():
    """A token changed in one sequence changes no gradient of another's loss."""
    rng = np.random.default_rng(1)
    trained, neighbour = sample(rng, 12), sample(rng, 20)
    model = build("qwen3")

    def gradients(neighbour_ids: np.ndarray) -> dict[str, torch.Tensor]:
        silent = TrainingSample(
            token_ids=neighbour_ids,
            loss_mask=np.zeros(20, np.bool_),
            logprobs=np.zeros(20, np.float32),
            versions=np.full(20, NOT_SAMPLED, np.int32),
            temperature=1.0,
            advantage=0.0,
            reward=0.0,
            env_name="e",
            rollout_id="n",
        )
        return run(model, build_batch([silent, trained], step=0, seq_len=32))[1]

    first, second = gradients(neighbour.token_ids), gradients((neighbour.token_ids + 1) % 97)
    for name, gradient in first.items():
        assert torch.allclose(gradient, second[name], rtol=0, atol=1e-6 * float(gradient.abs().max())), name
