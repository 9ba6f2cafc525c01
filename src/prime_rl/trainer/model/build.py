"""From a model directory to what is trained: one process's model, or slices over many ranks.

empty (meta) -> adapters -> memory and speed -> slices over the ranks, or whole -> values from the files
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import (
    StoredTensor,
    chosen_impl,
    empty_decoder,
    initial_tensors,
    load_config,
    load_stored,
    stored_tensors,
    tell_drawn,
    weight_files,
)
from prime_rl.models.language_model import LanguageModel
from prime_rl.trainer.model import memory
from prime_rl.trainer.model.adapters import add_adapters, initial_adapter_tensors
from prime_rl.trainer.model.head import resolved_chunk_tokens
from prime_rl.trainer.model.precision import DTYPES, ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.ranks import Ranks
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

    def refresh(self, num_micro_batches: int = 1) -> None:
        """Called once a step, before the first forward. `num_micro_batches`: how many this step has."""

    def collect(self) -> None:
        """Called after the backward of every micro-batch."""

    def stored(self) -> dict[str, Tensor]:
        """Every tensor under its Hugging Face name as it lies here: a DTensor where it is in slices.

        Float32 where it is trained; nothing is gathered or copied.
        """


def build_model(config: TrainerModelConfig, directory: Path, ranks: Ranks, *, seed: int) -> TrainedModel:
    """The model of `directory`, loaded. `seed` draws what no file holds, alike for every number of ranks.

    Raises: ModelError for a directory that does not fit, ConfigError for what the model, the machine or the number of
    ranks does not allow.
    """
    is_sharded = ranks.size > 1 or config.fsdp_cpu_offload
    if not is_sharded and config.dp_replicate > 1:
        raise ConfigError(
            f"model.dp_replicate is {config.dp_replicate}, but the trainer is one process: start it with torchrun on "
            "as many GPUs or a multiple, or drop the key"
        )
    dtype = DTYPES[config.optimization_dtype]
    model = _empty(config, directory)
    if config.lora is not None:
        add_adapters(model, config.lora)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # no master: frozen weights never need one
    memory.apply(model, config, ranks.device)
    chunk_tokens = resolved_chunk_tokens(
        config.fused_lm_head_chunk_size, vocab_size=model.vocab_size, dtype=dtype, device=ranks.device
    )
    scorer = Scorer(model, chunk_tokens=chunk_tokens)
    if is_sharded:
        from prime_rl.trainer.model.sharding import ShardedModel, shard  # noqa: PLC0415 (see `models.slices`)

        shard(scorer, config, ranks)
    device = torch.device("cpu") if config.fsdp_cpu_offload else ranks.device
    if is_sharded or not isinstance(model, Decoder):
        model.to_empty(device=device)
    else:  # the same without what torch imports for `empty_like` on the meta device, which takes half a second
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    for module in model.modules():
        for name, buffer in module._buffers.items():  # offloaded parameters visit the GPU, buffers stay there
            module._buffers[name] = None if buffer is None else buffer.to(ranks.device)
    load_stored(dict(model.named_parameters()), _values(config, directory, model, seed))
    return ShardedModel(scorer, ranks.device) if is_sharded else ComputeModel(scorer, dtype)


def _empty(config: TrainerModelConfig, directory: Path) -> LanguageModel:
    """The model on the meta device, in float32."""
    kept, trusted = config.debug.num_layers, config.trust_remote_code
    if chosen_impl(directory, config.impl, trust_remote_code=trusted) == "hf":
        from prime_rl.models.transformers_model import empty_transformers_model  # noqa: PLC0415 (takes two seconds)

        return empty_transformers_model(
            directory, dtype=torch.float32, trust_remote_code=trusted, num_layers=config.debug.num_layers
        )
    shape = load_config(directory)
    if kept is not None:
        shape = replace(shape, num_layers=min(kept, shape.num_layers))
    return empty_decoder(shape, device="meta", dtype=torch.float32)


def _values(
    config: TrainerModelConfig, directory: Path, model: LanguageModel, seed: int
) -> Iterator[tuple[str, StoredTensor]]:
    """What goes into the parameters of `model`: from the files, else drawn."""
    names = {name for name, _ in model.named_parameters()}
    if weight_files(directory) and not config.debug.random_init:
        for name, stored in stored_tensors(directory):
            if config.debug.num_layers is None or name in names:
                yield name, stored
    else:
        tell_drawn(directory, seed)
        for name, tensor in _drawn(model, seed):
            yield name, StoredTensor.of(tensor)
    for name, tensor in initial_adapter_tensors(model, seed):
        yield name, StoredTensor.of(tensor)


def _drawn(model: LanguageModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, Decoder):
        return initial_tensors(model.config, seed)
    from prime_rl.models.transformers_model import TransformersModel  # noqa: PLC0415 (takes two seconds)

    assert isinstance(model, TransformersModel)
    return model.initial_tensors(seed)
