"""The RL losses on a GPU: as on the CPU, and the same again."""

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
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.streams import TokenStreams

pytestmark = pytest.mark.gpu

COUNT, SEQUENCES = 20_000, 37
MASKS = {"token_mask_low": 0.5, "geo_mask_high": 1.02, "sequence_mask_high": 8.0}
CONFIGS = {
    "default": LossConfig(teacher_tau=0.3),
    "sequence": LossConfig(ratio_type="sequence", sequence_clip_high=2.0),
    "ipo": IPOLossConfig(tis_cap=1.5, **MASKS),
    "grpo": GRPOLossConfig(clip_ratio=1.5, **MASKS),
    "ppo_clip": PPOClipLossConfig(),
    "gspo": GSPOLossConfig(clip_low=0.01, clip_high=0.01),
    "cispo": CISPOLossConfig(**MASKS),
}


def streams(device: str, dtype: torch.dtype) -> TokenStreams:
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(COUNT, generator=generator)

    old = uniform(-4, -0.5)
    values = {
        "logprobs_N": (old + 0.3 * torch.randn(COUNT, generator=generator)).clamp(max=-0.01),
        "entropies_N": uniform(0, 2),
        "inference_logprobs_N": old,
        "advantages_N": torch.randn(COUNT, generator=generator),
        "ref_logprobs_N": uniform(-4, -0.1),
        "rl_weights_N": (uniform(0, 1) > 0.2).float(),
        "ce_weights_N": uniform(0, 1),
        "ref_kl_weights_N": (uniform(0, 1) > 0.5).float(),
    }
    moved = {name: tensor.to(device, dtype) for name, tensor in values.items()}
    moved["logprobs_N"].requires_grad_()
    sequence_N = torch.randint(SEQUENCES, (COUNT,), generator=generator).sort().values.to(device)
    return TokenStreams(**moved, sequence_N=sequence_N, num_sequences=SEQUENCES + 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_loss_is_the_same_on_a_gpu(config):
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float32)):
        given = streams(device, dtype)
        output = build_loss(config)(given)
        torch.stack(list(output.sums.values())).sum().backward()
        results.append((output, given.logprobs_N.grad))
    (exact, exact_grad), (found, grad), (_, grad_again) = results
    for stream, total in exact.sums.items():
        assert found.sums[stream].item() == pytest.approx(total.item(), rel=1e-4, abs=0.05), stream
    # A ratio at the edge of a bound may fall on either side of it in float32.
    differs = (grad.double().cpu() - exact_grad).abs() > 1e-4 * exact_grad.abs() + 1e-5
    assert differs.sum() <= 3
    assert torch.equal(grad, grad_again)
