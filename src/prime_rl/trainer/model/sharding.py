"""Training over several ranks: parameters, gradients and optimizer state in slices (FSDP2).

    (replicate, shard) mesh     each of `dp_replicate` groups holds the whole model, sliced over its ranks (HSDP);
                                with 1, all ranks are one group
    block                       whole in `optimization_dtype` from just before its forward until after it, and again
                                in backward; gradients are added up over ranks in `reduce_dtype`
    embedding, norm, head       whole from forward to the end of backward

Losses are divided by token counts of all ranks before backward, so gradients are sums over ranks and not means.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer.model.precision import DTYPES
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.streams import DeviceBatch


def build_mesh(ranks: Ranks, dp_replicate: int) -> DeviceMesh:
    """The ranks as (replicate, shard), or as one axis where nothing is replicated.

    Raises: ConfigError where the ranks are no whole number of groups.
    """
    if ranks.size % dp_replicate:
        raise ConfigError(
            f"model.dp_replicate is {dp_replicate}, but {ranks.size} ranks are not that many groups of one size; set "
            f"it to a divisor of {ranks.size}"
        )
    if dp_replicate == 1:
        return init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("shard",))
    shape = (dp_replicate, ranks.size // dp_replicate)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(scorer: Scorer, config: TrainerModelConfig, ranks: Ranks) -> None:
    """Slice every parameter of `scorer` over the ranks, in place; it may be on the meta device.

    Raises: ConfigError as `build_mesh`.
    """
    mesh = build_mesh(ranks, config.dp_replicate)
    dtype = DTYPES[config.optimization_dtype]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,  # activations have it from the embedding on; temperatures must not be rounded
    )
    pin = ranks.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if config.fsdp_cpu_offload else OffloadPolicy()
    blocks = scorer.model.blocks
    for block in blocks:
        # The last block's backward comes right after its forward: gathering it again would be for nothing.
        again = config.reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=again)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other; NCCL would multiply by one


class ShardedModel:
    """A model whose parameters, float32 where they are trained, lie in slices on the ranks.

    All ranks must call `score`, and backward of what it returned, alike.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        """`scorer`: after `shard`, its values loaded. `device`: where it computes."""
        assert isinstance(scorer, FSDPModule)
        self.model = scorer.model
        self.device = device
        self._scorer = scorer
        self._sharded: FSDPModule = scorer
        self._num_left = 1
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def score(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Logprobs, which carry gradients, and entropies of the tokens in the loss."""
        self._num_left -= 1
        # Within a group gradients are added up at every micro-batch, over the groups (HSDP) once a step.
        self._sharded.set_requires_all_reduce(self._num_left <= 0)
        out: tuple[Tensor, Tensor] = self._scorer(batch)
        return out

    def refresh(self, num_micro_batches: int = 1) -> None:
        """Parameters are converted each time they are gathered; only the micro-batches are counted."""
        self._num_left = num_micro_batches

    def collect(self) -> None:
        """Nothing to do: backward has added the gradients up over the ranks."""

    def stored(self) -> dict[str, Tensor]:
        """Every parameter under its Hugging Face name, detached, as it lies on the ranks (DTensors)."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}
