"""Optimizer state that lives on the host: the same weights, without the state on the GPU."""

import pytest
import torch
from torch import nn

from prime_rl.config.optim import AdamWConfig, MuonConfig, OptimizerConfig
from prime_rl.trainer.optim import host_state
from prime_rl.trainer.optim.optimizer import Optimizer, build_optimizer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def trained(config: OptimizerConfig, *, cpu_offload: bool) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(512, 512 + 64 * index, device=DEVICE, generator=generator)) for index in range(12)
    ]
    named = [(f"layers.{index}.weight", parameter) for index, parameter in enumerate(parameters)]
    optimizer = build_optimizer(named, config, lambda step: 0.01, cpu_offload=cpu_offload)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, device=DEVICE, generator=generator)
        optimizer.clip()
        optimizer.apply(step)
    return parameters, optimizer


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()])
def test_offload_changes_no_bit_of_weights_and_state(config, monkeypatch):
    resident, kept = trained(config, cpu_offload=False)
    monkeypatch.setattr(host_state, "BUCKET_BYTES", 1 << 22)  # a few parameters: many buckets in flight
    offloaded, away = trained(config, cpu_offload=True)
    assert all(torch.equal(one, other) for one, other in zip(resident, offloaded, strict=True))
    state, other_state = away.state_dict()["state"], kept.state_dict()["state"]
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned()
            assert torch.equal(tensor, other_state[name][key].cpu())
