"""Parameters without a model, whole or in slices over ranks, moved by each optimizer alike."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from prime_rl.config.optim import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig
from prime_rl.trainer.optim.optimizer import Optimizer, build_optimizer
from prime_rl.trainer.ranks import Ranks

CONFIGS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "sgd": SGDConfig(weight_decay=0.1),
    "muon": MuonConfig(weight_decay=0.1),
}
SHAPES = {  # rows that two ranks cannot share evenly, and a single row
    "embed_tokens.weight": (7, 4),
    "layers.0.up.weight": (5, 4),
    "layers.0.down.weight": (4, 6),
    "layers.0.norm.weight": (4,),
    "layers.1.up.weight": (1, 4),
    "norm.weight": (1,),
}
NUM_STEPS = 3


def initial() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def laid_out(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Whole without a mesh; else sliced over its last axis and copied over the others."""
    if mesh is None:
        return tensor.clone()
    return distribute_tensor(tensor, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])


def step(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter], number: int, mesh: DeviceMesh | None = None
) -> float:
    generator = torch.Generator().manual_seed(number + 1)
    for name, parameter in parameters.items():
        parameter.grad = laid_out(torch.randn(SHAPES[name], generator=generator), mesh)
    norm = optimizer.clip()
    optimizer.apply(number)
    return norm


def trained(
    config: OptimizerConfig, *, mesh: DeviceMesh | None, num_steps: int = NUM_STEPS, save_to: Path | None = None
) -> tuple[dict[str, nn.Parameter], list[float]]:
    """The parameters after a few steps, and the norms of their gradients before clipping."""
    parameters = {name: nn.Parameter(laid_out(tensor, mesh)) for name, tensor in initial()}
    optimizer = build_optimizer(parameters.items(), config, lambda step: 0.1)
    norms = [step(optimizer, parameters, number, mesh) for number in range(num_steps)]
    if save_to is not None:
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=save_to)
    return parameters, norms


def train_all(ranks: Ranks, checkpoint: Path) -> dict[str, tuple[list[float], dict[str, np.ndarray]]]:
    """Run on each rank: norms and parameters by "layout kind". The state of "sliced muon" is saved to `checkpoint`."""
    results = {}
    for layout, shape in {"sliced": (ranks.size,), "replicated": (ranks.size, 1)}.items():
        mesh = init_device_mesh("cpu", shape)
        for kind, config in CONFIGS.items():
            save_to = checkpoint if (layout, kind) == ("sliced", "muon") else None
            parameters, norms = trained(config, mesh=mesh, save_to=save_to)
            whole = {name: parameter.full_tensor().detach().numpy() for name, parameter in parameters.items()}
            results[f"{layout} {kind}"] = (norms, whole)
    return results
