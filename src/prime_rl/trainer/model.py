"""From a model directory to what is trained: one process's model, or slices over many ranks.

empty (meta) -> adapters -> memory and speed -> slices over the ranks, or whole -> values from the files
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.models.hf import empty_decoder, load_config, load_stored, stored_tensors
from prime_rl.models.language_model import LanguageModel
from prime_rl.trainer import memory
from prime_rl.trainer.head import resolved_chunk_tokens
from prime_rl.trainer.parallel import DTYPES, ShardedModel, shard
from prime_rl.trainer.precision import ComputeModel
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.scoring import Scorer
from prime_rl.trainer.streams import DeviceBatch


class TrainedModel(Protocol):
    """A model in training. `parameters` are those that are trained, float32, under Hugging Face's names."""

    model: LanguageModel
    parameters: dict[str, nn.Parameter]

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def score(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Logprobs, which carry gradients, and entropies of the tokens in the loss, float32 [N]. All ranks at once."""

    def refresh(self) -> None:
        """Called once a step, before the first forward."""

    def collect(self) -> None:
        """Called after the backward of every micro-batch."""

    def stored(self) -> dict[str, Tensor]:
        """Every tensor under its Hugging Face name as it lies here: a DTensor where it is in slices.

        Float32 where it is trained; nothing is gathered or copied.
        """


def build_model(config: TrainerModelConfig, directory: Path, ranks: Ranks, *, seed: int) -> TrainedModel:
    """The model of `directory`, loaded. `seed` draws what no file holds, alike for every number of ranks.

    Raises: ModelError for a directory that does not fit, ConfigError for ranks that do not.
    """
    model = empty_decoder(load_config(directory), device="meta", dtype=torch.float32)
    dtype = DTYPES[config.optimization_dtype]
    chunk_tokens = resolved_chunk_tokens(
        config.fused_lm_head_chunk_size, vocab_size=model.vocab_size, dtype=dtype, device=ranks.device
    )
    scorer = Scorer(model, chunk_tokens=chunk_tokens)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # no master: frozen weights never need one
    memory.apply(model, config, ranks.device)
    is_sharded = ranks.size > 1 or config.fsdp_cpu_offload
    if is_sharded:
        shard(scorer, config, ranks)
    model.to_empty(device="cpu" if config.fsdp_cpu_offload else ranks.device)
    load_stored(dict(model.named_parameters()), stored_tensors(directory, seed))
    return ShardedModel(scorer, ranks.device) if is_sharded else ComputeModel(scorer, dtype)
