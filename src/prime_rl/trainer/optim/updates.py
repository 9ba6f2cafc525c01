"""How an optimizer moves weights: AdamW and SGD, for parameters that are whole or in slices (DTensor).

Both work on each element by itself, so every rank updates its slices alone. Rules keep no state of their own: what
a parameter needs lies beside it in a `Slot`, where it can be saved, sliced anew and moved to the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from prime_rl.models.slices import in_slices

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter and its optimizer state, sliced alike."""

    name: str
    parameter: nn.Parameter
    state: Mapping[str, Tensor]


class Rule(Protocol):
    """What is done to parameters of one kind."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """What a slot's state holds: tensors of the parameter's shape, zero before the first step."""

    def update(self, slots: Sequence[Slot], lr: float, step: int) -> None:
        """Move the parameters by their gradients, and their state. `step` counts updates from 1. All ranks at once."""


def local(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing memory; the tensor itself where it is whole. Looked up anew each time: FSDP moves
    its slices at the first forward."""
    return tensor.to_local() if in_slices(tensor) else tensor


def local_grad(slot: Slot) -> Tensor:
    """This rank's slice of the gradient."""
    assert slot.parameter.grad is not None
    return local(slot.parameter.grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """What one fused kernel takes: lists over the parameters that have anything to update here."""

    parameters: list[Tensor]
    grads: list[Tensor]
    states: Mapping[str, list[Tensor]]

    @classmethod
    def of(cls, slots: Sequence[Slot], state_names: Sequence[str]) -> "_Columns":
        present = [slot for slot in slots if slot.parameter.grad is not None and local(slot.parameter).numel()]
        return cls(
            parameters=[local(slot.parameter) for slot in present],
            grads=[local_grad(slot) for slot in present],
            states={name: [local(slot.state[name]) for slot in present] for name in state_names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2)."""

    betas: tuple[float, float]
    weight_decay: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(self, slots: Sequence[Slot], lr: float, step: int) -> None:
        columns = _Columns.of(slots, self.state_names)
        if not columns.parameters:
            return
        count, device = len(columns.parameters), columns.parameters[0].device
        adamw(
            columns.parameters,
            columns.grads,
            columns.states["exp_avg"],
            columns.states["exp_avg_sq"],
            max_exp_avg_sqs=[],
            # The number of updates before this one, which the kernel counts up: one number for each parameter.
            state_steps=list(torch.full((count,), step - 1.0, device=device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=EPSILON,
            maximize=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD`: the decay is part of the gradient and so of the momentum."""

    momentum: float
    nesterov: bool
    weight_decay: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update(self, slots: Sequence[Slot], lr: float, step: int) -> None:
        columns = _Columns.of(slots, self.state_names)
        if not columns.parameters:
            return
        nothing: list[Tensor | None] = [None] * len(columns.parameters)
        sgd(
            columns.parameters,
            columns.grads,
            [*columns.states["momentum_buffer"]] if self.momentum else nothing,
            fused=True,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov and self.momentum > 0,
            maximize=False,
        )
