"""Muon: momentum whose matrix is replaced by the nearest one with equal singular values.

    M <- mu M + G,   U = G + mu M (Nesterov),   W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) orthogonal(U)

The orthogonalisation and its coefficients are Keller Jordan's (https://kellerjordan.github.io/posts/muon); the factor,
which gives updates the size of AdamW's, so that one learning rate serves both, is equation 4 of arXiv 2502.16982.

It needs whole matrices. Of sliced ones, as many at a time as there are ranks: each rank is sent the slices of one,
makes it orthogonal, and sends the slices of the result back. So no matrix is computed twice, and a rank receives and
sends about what one gathering of the parameters moves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from prime_rl.models.slices import in_slices
from prime_rl.trainer.optim.updates import Slot, local, local_grad

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: steep at zero, and five rounds bring singular values of 0.003 to 1 into 0.68 to 1.13."""
ROUNDS = 5
TINY = 1e-7


def newton_schulz(matrix: Tensor) -> Tensor:
    """About U V^T of matrix = U S V^T, in the matrix' dtype: five rounds of an odd polynomial of S."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / (x.norm() + TINY)
    first, third, fifth = COEFFICIENTS
    for _ in range(ROUNDS):
        square = x @ x.t()
        x = torch.addmm(x, torch.addmm(square, square, square, beta=third, alpha=fifth), x, beta=first)
    return x.t() if is_tall else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """The rule above, for matrices that are whole or sliced by rows over one axis of a mesh."""

    mu: float
    weight_decay: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def update(self, slots: Sequence[Slot], lr: float, step: int) -> None:
        present = [slot for slot in slots if slot.parameter.grad is not None]
        for mesh, members in groupby(present, key=_mesh):
            together = list(members)
            group = None if mesh is None else _shard_group(mesh, together)
            size = 1 if group is None else dist.get_world_size(group)
            for start in range(0, len(together), size):
                run = together[start : start + size]
                directions = [self._direction(slot) for slot in run]
                if group is None:
                    results = [newton_schulz(direction) for direction in directions]
                else:
                    results = _orthogonal([slot.parameter.shape for slot in run], directions, group)
                for slot, result in zip(run, results, strict=True):
                    self._move(slot, result, lr)

    def _direction(self, slot: Slot) -> Tensor:
        """The momentum with Nesterov's look ahead, in what Newton-Schulz computes in: it needs no more than bfloat16,
        which a CPU has no fast matmuls for."""
        momentum, grad = local(slot.state["momentum_buffer"]), local_grad(slot)
        momentum.mul_(self.mu).add_(grad)
        return grad.add(momentum, alpha=self.mu).to(torch.bfloat16 if grad.is_cuda else torch.float32)

    def _move(self, slot: Slot, orthogonal: Tensor, lr: float) -> None:
        weight, scale = local(slot.parameter), 0.2 * math.sqrt(max(slot.parameter.shape))
        weight.mul_(1 - lr * self.weight_decay).add_(orthogonal, alpha=-lr * scale)


def _mesh(slot: Slot) -> DeviceMesh | None:
    return slot.parameter.device_mesh if in_slices(slot.parameter) else None


def _shard_group(mesh: DeviceMesh, slots: Sequence[Slot]) -> dist.ProcessGroup:
    """The ranks that the rows of every one of `slots` are sliced over; replicas (HSDP) do the same work each."""
    axes = set()
    for slot in slots:
        assert in_slices(slot.parameter)
        placements = slot.parameter.placements
        axes.add(next(axis for axis, placement in enumerate(placements) if placement.is_shard(0)))
        assert all(placement.is_replicate() or placement.is_shard(0) for placement in placements)
    (axis,) = axes
    return mesh.get_group(axis)


def slice_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Rows of each rank's slice, as `Shard(0)` cuts them: the last ranks may have fewer or none.

    Example: slice_rows(5, 4) -> [2, 2, 1, 0]
    """
    most = math.ceil(num_rows / num_ranks)
    return [max(0, min(most, num_rows - most * rank)) for rank in range(num_ranks)]


def _orthogonal(shapes: Sequence[torch.Size], directions: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """This rank's slices of the orthogonalised matrices, of which there are at most as many as ranks.

    `shapes`: of the whole matrices. `directions`: this rank's slices of them.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [direction.numel() for direction in directions] + [0] * (size - len(directions))
    rows, columns = shapes[rank] if rank < len(shapes) else (0, 0)
    received = [count * columns for count in slice_rows(rows, size)]
    slices = torch.cat([direction.flatten() for direction in directions])
    whole = slices.new_empty(rows * columns)
    dist.all_to_all_single(whole, slices, received, sent, group=group)
    if len(whole):
        whole = newton_schulz(whole.view(rows, columns)).flatten()
    dist.all_to_all_single(slices, whole, sent, received, group=group)
    pieces = slices.split(sent)[: len(directions)]
    return [piece.view_as(direction) for piece, direction in zip(pieces, directions, strict=True)]
