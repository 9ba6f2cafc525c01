"""Reads back what a vLLM model serves, tensor by tensor under the Hugging Face names it was published with. No vllm.

vLLM joins matrices that share an input: `qkv_proj` holds q, k and v, `gate_up_proj` two more. A model's
`packed_modules_mapping` names them, and a joined layer's `output_sizes` says where to cut. On the CPU a layer's weight
is packed for its kernel and the original is gone; the kernel itself is asked then, with unit vectors, whose products
are the weights exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.errors import InferenceError

_UNIT_VECTORS = 1024
"""How many are asked at once."""


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """While inside, the layers that vLLM has wrapped for adapters are what they were: names and loading as without."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(getattr(child, "base_layer", None), nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def served_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter; views where possible. One GPU holds the whole model.

    Raises: InferenceError naming a parameter that cannot be read back under its published name.
    """
    for name, parameter, layer, parts in _parameters(model):
        tensor = _whole(layer, name.rpartition(".")[2], parameter.detach(), name)
        if len(parts) == 1:
            yield parts[0], tensor
            continue
        sizes = [int(size) for size in getattr(layer, "output_sizes", ())]
        if len(sizes) != len(parts) or sum(sizes) != tensor.shape[0]:
            raise InferenceError(f"vLLM's parameter {name} of shape {list(tensor.shape)} cannot be cut into {parts}")
        yield from zip(parts, tensor.split(sizes), strict=True)


def served_types(model: nn.Module) -> dict[str, torch.dtype]:
    """The type of each of `served_tensors`, of which nothing is read."""
    return {
        part: parameter.dtype if parameter.numel() else _packed_type(layer)
        for _, parameter, layer, parts in _parameters(model)
        for part in parts
    }


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module, list[str]]]:
    """vLLM's name of every parameter, its layer, and the published names of what is in it."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        path, _, module = owner.rpartition(".")
        parts = packed.get(module, [module])
        names = [name] if len(parts) == 1 else [".".join(filter(None, [path, part, kind])) for part in parts]
        yield name, parameter, modules[owner], names


def _whole(layer: nn.Module, kind: str, tensor: Tensor, name: str) -> Tensor:
    """The parameter as it was loaded: unpacked, and without the rows that vLLM pads vocabularies with."""
    if tensor.numel() == 0 and kind == "weight":
        return _asked(layer, name)
    if tensor.ndim > 2:
        raise InferenceError(f"vLLM's parameter {name} joins the weights of experts, which are not read back")
    rows = getattr(layer, "org_vocab_size", None)
    return tensor if rows is None else tensor[:rows]


def _asked(layer: Any, name: str) -> Tensor:
    """[out, in] what a layer multiplies with, from its own kernel; exact, since all but one product are zero."""
    compute, num_inputs = getattr(layer, "cpu_linear", None), getattr(layer, "input_size", None)
    dtype = _packed_type(layer)
    if compute is None or num_inputs is None:
        raise InferenceError(f"vLLM has packed its parameter {name}, which cannot be read back")
    columns = []
    for start in range(0, num_inputs, _UNIT_VECTORS):
        count = min(_UNIT_VECTORS, num_inputs - start)
        units = torch.zeros(count, num_inputs, dtype=dtype)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(compute(units, layer.weight, None).T)
    return torch.cat(columns, dim=1)


def _packed_type(layer: nn.Module) -> torch.dtype:
    """Of a weight that is gone."""
    return getattr(layer, "params_dtype", None) or torch.get_default_dtype()
