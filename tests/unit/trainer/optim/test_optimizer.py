import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.doubles import optimization
from tests.doubles.ranks import on_ranks
from torch import nn

from prime_rl.config.optim import (
    AdamWConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    SGDConfig,
)
from prime_rl.errors import ArtifactError
from prime_rl.trainer.optim.optimizer import build_optimizer, build_schedule


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


def torch_adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), foreach=False, fused=False)


def torch_sgd(**options) -> Callable[[list[dict]], torch.optim.Optimizer]:
    return lambda groups: torch.optim.SGD(groups, lr=0.1, foreach=False, fused=False, **options)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (AdamWConfig(lr=0.1, weight_decay=0.5, betas1=0.8, betas2=0.9), torch_adamw),
        (SGDConfig(lr=0.1, weight_decay=0.5), torch_sgd(momentum=0.9, nesterov=True)),
        (SGDConfig(lr=0.1, weight_decay=0.5, momentum=0.8, nesterov=False), torch_sgd(momentum=0.8)),
        (SGDConfig(lr=0.1, weight_decay=0.5, momentum=0.0), torch_sgd()),
    ],
)
def test_steps_equal_those_of_torch_with_decay_on_matrices_only(config, reference):
    ours, theirs = tiny_model(), tiny_model()
    optimizer = build_optimizer(ours.named_parameters(), config, lambda step: 0.1 / (step + 1))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    expected = reference(groups)
    for step in range(3):
        backward(ours, scale=10)
        backward(theirs, scale=10)
        norm = optimizer.clip()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        assert norm > 1
        assert optimizer.apply(step) == 0.1 / (step + 1)
        for group in expected.param_groups:
            group["lr"] = 0.1 / (step + 1)
        expected.step()
        expected.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other, atol=1e-6)


def test_the_first_adamw_step_is_that_computed_by_hand():
    parameter = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    config = AdamWConfig(weight_decay=0.1, betas1=0.9, betas2=0.99)
    optimizer = build_optimizer([("w", parameter)], config, lambda step: 0.5)
    parameter.grad = torch.tensor([[0.3, -0.4]])
    assert optimizer.clip() == pytest.approx(0.5)
    optimizer.apply(0)
    # Means corrected for their start at zero are g and g^2, so the first step is lr * sign(g) after the decay.
    assert parameter.tolist()[0] == pytest.approx([2.0 * 0.95 - 0.5, -1.0 * 0.95 + 0.5], abs=1e-6)


def test_weight_decay_leaves_norms_and_biases_alone():
    model = tiny_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model.named_parameters(), AdamWConfig(weight_decay=0.5), lambda step: 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.apply(0)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old * (0.95 if old.ndim == 2 else 1.0))


def test_clipping_scales_large_gradients_only_and_reports_the_norm_they_had():
    model = tiny_model()
    optimizer = build_optimizer(model.named_parameters(), AdamWConfig(max_norm=0.5), lambda step: 0.1)
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


def test_frozen_parameters_and_those_without_a_gradient_stay_as_they_are():
    model = tiny_model()
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), AdamWConfig(), lambda step: 0.1)
    assert "0.weight" not in optimizer.state_dict()["state"]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    last.grad = torch.ones_like(last)
    optimizer.apply(0)
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, False, False, True]


@pytest.mark.parametrize("config", [AdamWConfig(), SGDConfig(), MuonConfig()])
def test_a_loaded_state_continues_as_if_nothing_had_happened(config):
    def trained(model, optimizer, steps):
        for step in steps:
            backward(model)
            optimizer.apply(step)

    straight = tiny_model()
    optimizer = build_optimizer(straight.named_parameters(), config, lambda step: 0.1)
    trained(straight, optimizer, range(2))
    resumed = tiny_model()
    resumed.load_state_dict(straight.state_dict())
    other = build_optimizer(resumed.named_parameters(), config, lambda step: 0.1)
    other.load_state_dict(optimizer.state_dict())
    trained(straight, optimizer, range(2, 4))
    trained(resumed, other, range(2, 4))
    assert all(torch.equal(one, two) for one, two in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_state_of_another_optimizer_is_refused_with_the_parameter_that_does_not_fit():
    model = tiny_model()
    adamw = build_optimizer(model.named_parameters(), AdamWConfig(), lambda step: 0.1)
    with pytest.raises(ArtifactError, match=r"0\.bias and 4 more do not fit; resume with the optim.type"):
        adamw.load_state_dict(build_optimizer(model.named_parameters(), SGDConfig(), lambda step: 0.1).state_dict())


def test_muon_takes_matrices_except_embeddings_and_heads():
    shapes = {
        "model.embed_tokens.weight": (6, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.up_proj.lora_A": (2, 4),
        "model.layers.0.mlp.up_proj.bias": (6,),
        "model.norm.weight": (4,),
        "transformer.wte.weight": (6, 4),
        "lm_head.weight": (6, 4),
    }
    named = [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
    state = build_optimizer(named, MuonConfig(), lambda step: 0.1).state_dict()["state"]
    by_muon = [name for name in shapes if list(state[name]) == ["momentum_buffer"]]
    assert by_muon == ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.lora_A"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[dict, Path]:
    """What each optimizer made of the parameters on two ranks, and a state that they saved."""
    checkpoint = tmp_path_factory.mktemp("ranks") / "checkpoint"
    first, second = on_ranks(2, optimization.train_all, checkpoint)
    assert {case: norms for case, (norms, _) in first.items()} == {case: norms for case, (norms, _) in second.items()}
    return first, checkpoint


@pytest.mark.parametrize("kind", optimization.CONFIGS)
@pytest.mark.parametrize("layout", ["sliced", "replicated"])
def test_two_ranks_move_weights_as_one_does(two_ranks, kind, layout):
    parameters, norms = optimization.trained(optimization.CONFIGS[kind], mesh=None)
    norms_of_two, parameters_of_two = two_ranks[0][f"{layout} {kind}"]
    assert norms_of_two == pytest.approx(norms, rel=1e-6)
    for name, before in optimization.initial():
        moved = float((parameters[name].detach() - before).norm())
        assert moved > 0
        difference = torch.from_numpy(parameters_of_two[name]) - parameters[name].detach()
        assert float(difference.norm()) <= 1e-5 * moved, name


def test_a_state_saved_from_two_ranks_loads_into_one(two_ranks):
    results, checkpoint = two_ranks
    config, num_steps = optimization.CONFIGS["muon"], optimization.NUM_STEPS
    parameters = {name: nn.Parameter(torch.from_numpy(value)) for name, value in results["sliced muon"][1].items()}
    optimizer = build_optimizer(parameters.items(), config, lambda step: 0.1)
    loaded = {"optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=checkpoint, no_dist=True)
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.state_dict()["updates"] == num_steps
    optimization.step(optimizer, parameters, num_steps)
    straight, _ = optimization.trained(config, mesh=None, num_steps=num_steps + 1)
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, straight[name], rtol=1e-5, atol=1e-6), name
