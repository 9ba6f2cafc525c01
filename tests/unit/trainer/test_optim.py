import math

import pytest
import torch
from torch import nn

from prime_rl.config.trainer import AdamWConfig, ConstantSchedulerConfig, CosineSchedulerConfig, LinearSchedulerConfig
from prime_rl.trainer.optim import ScheduledAdamW, build_schedule


def table(config, *, peak_lr: float, max_steps: int) -> list[float]:
    schedule = build_schedule(config, peak_lr=peak_lr, max_steps=max_steps)
    return [schedule(step) for step in range(max_steps)]


def test_a_constant_rate_needs_no_end():
    schedule = build_schedule(ConstantSchedulerConfig(), peak_lr=3.0, max_steps=None)
    assert [schedule(step) for step in (0, 7, 10**6)] == [3.0] * 3


def test_a_linear_schedule_rises_stays_and_falls():
    rates = table(LinearSchedulerConfig(warmup_steps=2, decay_steps=3), peak_lr=4.0, max_steps=8)
    assert rates == pytest.approx([0, 2, 4, 4, 4, 4, 2, 0])


def test_a_linear_schedule_starts_and_ends_at_its_least_rate():
    rates = table(LinearSchedulerConfig(warmup_steps=2, decay_steps=3, min_lr=1.0), peak_lr=5.0, max_steps=6)
    assert rates == pytest.approx([1, 3, 5, 5, 3, 1])


def test_a_linear_schedule_without_ramps_is_constant():
    assert table(LinearSchedulerConfig(warmup_steps=0, decay_steps=0), peak_lr=2.0, max_steps=3) == [2, 2, 2]
    assert table(LinearSchedulerConfig(warmup_steps=0, decay_steps=1), peak_lr=2.0, max_steps=3) == [2, 2, 0]


def test_a_cosine_schedule_falls_by_half_a_cosine_to_the_last_step():
    rates = table(CosineSchedulerConfig(warmup_steps=1, min_lr=1.0), peak_lr=3.0, max_steps=6)
    half = [2 + math.cos(math.pi * quarter / 4) for quarter in range(5)]
    assert rates == pytest.approx([1, *half])
    assert rates[-1] == pytest.approx(1.0)


def test_a_cosine_schedule_that_is_all_warm_up_reaches_no_further():
    assert table(CosineSchedulerConfig(warmup_steps=2), peak_lr=2.0, max_steps=2) == pytest.approx([0, 1])
    assert table(CosineSchedulerConfig(warmup_steps=0), peak_lr=2.0, max_steps=1) == pytest.approx([0])


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    (scale * model(inputs).square().sum()).backward()


def test_steps_equal_those_of_torch_with_decay_on_matrices_only():
    config = AdamWConfig(lr=0.1, weight_decay=0.5, max_norm=1.0, betas1=0.8, betas2=0.9)
    ours, theirs = tiny_model(), tiny_model()
    optimizer = ScheduledAdamW(ours, config, lambda step: 0.1 / (step + 1))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), foreach=False, fused=False)
    for step in range(3):
        backward(ours)
        backward(theirs)
        norm = optimizer.clip()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        assert norm > 1
        assert optimizer.apply(step) == 0.1 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        reference.step()
        reference.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other, atol=1e-6)


def test_weight_decay_leaves_norms_and_biases_alone():
    model = tiny_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = ScheduledAdamW(model, AdamWConfig(lr=0.1, weight_decay=0.5), lambda step: 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.apply(0)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old * (0.95 if old.ndim == 2 else 1.0))


def test_clipping_scales_large_gradients_only_and_reports_the_norm_they_had():
    model = tiny_model()
    optimizer = ScheduledAdamW(model, AdamWConfig(max_norm=0.5), lambda step: 0.1)
    backward(model, scale=100)
    norm = optimizer.clip()
    assert norm > 0.5
    assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.5, rel=1e-4)
    optimizer.apply(0)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, scale=1e-6)
    small = [parameter.grad.clone() for parameter in model.parameters()]
    assert optimizer.clip() < 0.5
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), small, strict=True))
