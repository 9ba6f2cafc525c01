"""Tensors in slices over several ranks (torch's DTensor), for modules that run where nothing is cut as well.

Importing DTensor takes as long as half of torch, so only what cuts imports it.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_slices(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor. Nothing is where nobody has imported that class."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def held_rows(tensor: "DTensor") -> tuple[int, int]:
    """Which rows of the whole tensor this rank holds, when it is cut along its first dimension and no other."""
    start, stop = 0, tensor.shape[0]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh holds nothing"
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        assert placement.is_shard(0), placement
        share = -(-(stop - start) // tensor.device_mesh.size(axis))  # as torch.chunk cuts
        first = min(start + coordinate[axis] * share, stop)
        start, stop = first, min(first + share, stop)
    assert stop - start == tensor.to_local().shape[0]
    return start, stop
