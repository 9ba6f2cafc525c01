"""What an optimizer step is: gradient clipping, a scheduled learning rate, and a rule for each kind of parameter."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from prime_rl.config.optim import (
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from prime_rl.errors import ArtifactError
from prime_rl.models.slices import in_slices
from prime_rl.trainer.optim.host_state import HostState
from prime_rl.trainer.optim.muon import Muon
from prime_rl.trainer.optim.updates import SGD, AdamW, Rule, Slot, local

Schedule = Callable[[int], float]
"""Learning rate of a step, counted from 0. It has no state, so a resumed run needs none."""


def build_schedule(
    config: ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig,
    *,
    peak_lr: float,
    max_steps: int | None,
) -> Schedule:
    """The schedule that a configuration describes.

    The first step of a warm-up has `min_lr`, step `warmup_steps` is the first at the peak, and the last
    step of the run has `min_lr` again (linear: at the end of its `decay_steps`; cosine: from the peak on).
    """
    if isinstance(config, ConstantSchedulerConfig):
        return lambda step: peak_lr
    assert max_steps is not None, "the configuration refuses a decaying schedule without max_steps"
    last_step = max_steps - 1
    warmup_steps, min_lr = config.warmup_steps, config.min_lr

    def after_warmup(progress: Callable[[int], float]) -> Schedule:
        def schedule(step: int) -> float:
            if step < warmup_steps:
                return min_lr + (peak_lr - min_lr) * step / warmup_steps
            return peak_lr - (peak_lr - min_lr) * progress(step)

        return schedule

    if isinstance(config, CosineSchedulerConfig):
        return after_warmup(lambda step: (1 - math.cos(math.pi * _fraction(step, warmup_steps, last_step))) / 2)
    if config.decay_steps == 0:
        return after_warmup(lambda step: 0.0)
    decay_start = max_steps - config.decay_steps
    return after_warmup(lambda step: _fraction(step, decay_start, last_step) if step >= decay_start else 0.0)


def _fraction(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` to `end`: 0 to 1."""
    return 1.0 if step >= end else max(0, step - start) / (end - start)


class Optimizer:
    """Moves parameters by their gradients: clipped, at a scheduled rate, each kind by its own rule.

    Parameters may be whole or DTensors; of sliced ones every rank holds the state of its own slices.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Rule, Sequence[Slot]]],
        *,
        max_norm: float,
        schedule: Schedule,
        host: HostState | None,
    ) -> None:
        """`groups`: who is moved how; names are unique. `host`: what takes their states there; None: they stay."""
        self._groups = groups
        self._parameters = [slot.parameter for _, slots in groups for slot in slots]
        self._max_norm = max_norm
        self._schedule = schedule
        self._host = host
        self._updates = 0

    @torch.no_grad()
    def clip(self) -> float:
        """Scale the gradients down to the largest allowed L2 norm over all ranks; returns the norm they had.

        All ranks at once. The device is waited for once, to read that norm.
        """
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = float(global_norm(grads))
        if math.isfinite(norm) and norm > self._max_norm:
            torch._foreach_mul_([local(grad) for grad in grads], self._max_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def apply(self, step: int) -> float:
        """Move the weights at the learning rate of `step`, which is returned, and clear the gradients.

        All ranks at once.
        """
        lr = self._schedule(step)
        self._updates += 1
        for rule, slots in self._groups:
            for visiting in (slots,) if self._host is None else self._host.visits(slots):
                rule.update(visiting, lr, self._updates)
        self.drop_gradients()
        return lr

    def drop_gradients(self) -> None:
        """Forget the gradients, so that the next step begins with none."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state itself, not a copy: number of updates, and tensors by parameter, sliced as the parameters are.

        It is complete before the first step, so that `torch.distributed.checkpoint` can load into it.
        """
        if self._host is not None:
            self._host.settle()
        slots = [slot for _, slots in self._groups for slot in slots]
        return {"updates": self._updates, "state": {slot.name: dict(slot.state) for slot in slots}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or what was loaded into that.

        Raises: ArtifactError where it is of another optimizer or of other parameters.
        """
        mine = self.state_dict()["state"]
        theirs = state["state"]
        if {name: set(of) for name, of in mine.items()} != {name: set(of) for name, of in theirs.items()}:
            differing = sorted(
                name for name in {*mine, *theirs} if set(mine.get(name, ())) != set(theirs.get(name, ()))
            )
            raise ArtifactError(
                f"the optimizer state was saved by another optimizer or for other parameters: {differing[0]} and "
                f"{len(differing) - 1} more do not fit; resume with the optim.type and model.lora that wrote it"
            )
        self._updates = int(state["updates"])
        for name, tensors in mine.items():
            for key, tensor in tensors.items():
                if theirs[name][key] is not tensor:
                    tensor.copy_(theirs[name][key])


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients over all ranks, a float32 scalar on their device. All ranks at once.

    Slices are added up over the ranks that hold different ones, replicas (HSDP) counted once.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if in_slices(grad) else None
        by_layout.setdefault(layout, []).append(local(grad))
    total = torch.zeros(())
    for layout, slices in by_layout.items():
        present = [piece for piece in slices if piece.numel()]
        square = get_total_norm(present).square() if present else torch.zeros((), device=slices[0].device)
        for axis, placement in enumerate(layout[1] if layout else ()):
            assert placement.is_shard() or placement.is_replicate()
            if placement.is_shard():
                dist.all_reduce(square, group=layout[0].get_group(axis))
        total = total.to(square.device) + square
    return total.sqrt()


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    schedule: Schedule,
    *,
    cpu_offload: bool = False,
) -> Optimizer:
    """The optimizer that a configuration describes, its state zero. Parameters must be where they stay.

    Weight decay is applied to matrices and not to one-dimensional parameters (norms and biases). Muon moves matrices
    except embeddings and heads, AdamW what it leaves. `cpu_offload`: the state lies in the host's memory between steps.
    """
    kinds: dict[Rule, list[Slot]] = {}
    host: HostState | None = None
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        rule = _rule(name, parameter, config)
        if cpu_offload and host is None:
            host = HostState(parameter.device)
        empty = torch.zeros_like if host is None else host.zeros_like
        with torch.no_grad():
            state = {key: empty(parameter) for key in rule.state_names}
        kinds.setdefault(rule, []).append(Slot(name, parameter, state))
    return Optimizer(list(kinds.items()), max_norm=config.max_norm, schedule=schedule, host=host)


def _rule(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> Rule:
    decay = config.weight_decay if parameter.ndim >= 2 else 0.0
    if isinstance(config, SGDConfig):
        return SGD(momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay)
    if isinstance(config, MuonConfig) and parameter.ndim == 2 and not _EMBEDDING.search(name):
        return Muon(mu=config.mu, weight_decay=decay)
    return AdamW(betas=(config.betas1, config.betas2), weight_decay=decay)


_EMBEDDING = re.compile(r"embed|lm_head|\bw[tp]e\b")
"""Names of embeddings and heads: lookups, for which the spectral norm means nothing."""
