import math

import pytest
import torch
from torch import nn

from prime_rl.trainer.optim.muon import Muon, newton_schulz, slice_rows
from prime_rl.trainer.optim.updates import Slot


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_newton_schulz_applies_its_polynomial_to_the_singular_values(shape):
    matrix = random(*shape)
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(newton_schulz(matrix).double(), u @ torch.diag(s) @ vt, atol=1e-4)
    assert 0.6 < s.min() <= s.max() < 1.2


def test_a_zero_matrix_stays_zero():
    assert newton_schulz(torch.zeros(3, 2)).abs().sum() == 0


def muon_slot(weight: torch.Tensor) -> Slot:
    parameter = nn.Parameter(weight.clone())
    return Slot("w", parameter, {"momentum_buffer": torch.zeros_like(weight)})


def test_two_updates_are_those_computed_by_hand():
    weight, grads = random(3, 5), [random(3, 5, seed=1), random(3, 5, seed=2)]
    slot, rule = muon_slot(weight), Muon(mu=0.9, weight_decay=0.2)
    scale = 0.2 * math.sqrt(5)
    slot.parameter.grad = grads[0].clone()
    with torch.no_grad():
        rule.update([slot], 0.1, 1)
    expected = weight * 0.98 - 0.1 * scale * newton_schulz(1.9 * grads[0])
    assert torch.allclose(slot.parameter, expected, atol=1e-6)
    slot.parameter.grad = grads[1].clone()
    with torch.no_grad():
        rule.update([slot], 0.1, 2)
    momentum = 0.9 * grads[0] + grads[1]
    expected = expected * 0.98 - 0.1 * scale * newton_schulz(grads[1] + 0.9 * momentum)
    assert torch.allclose(slot.parameter, expected, atol=1e-6)


def test_it_moves_weights_as_torchs_own_does_but_for_the_rounding_of_that():
    weight = random(6, 8)
    slot, rule, theirs = muon_slot(weight), Muon(mu=0.95, weight_decay=0.1), nn.Parameter(weight.clone())
    reference = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(1, 4):
        grad = random(6, 8, seed=step)
        slot.parameter.grad, theirs.grad = grad.clone(), grad.clone()
        with torch.no_grad():
            rule.update([slot], 0.1, step)
        reference.step()
    moved = (theirs - weight).norm()
    assert (slot.parameter - theirs).norm() < 0.02 * moved  # it computes in bfloat16


def test_rows_are_cut_as_torch_cuts_them():
    for num_rows in range(9):
        for num_ranks in range(1, 6):
            pieces = [len(piece) for piece in torch.arange(num_rows).chunk(num_ranks)] if num_rows else []
            assert slice_rows(num_rows, num_ranks) == pieces + [0] * (num_ranks - len(pieces))
