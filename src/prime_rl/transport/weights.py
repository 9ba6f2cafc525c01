"""Model weights from the trainer to the inference engine through the filesystem. Both ends.

`<weights_dir>/step_N/` is a Hugging Face model directory (safetensors in shards of at most 5 GB, config,
tokenizer) beside the marker of `transport.manifest`. The channel sees (name, tensor) pairs, never a model.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from prime_rl.models.hf import MAX_SHARD_BYTES, copy_assets, read_json, read_safetensors, write_safetensors
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import publish_dir, verify


def publish_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    step: int,
    weights_dir: Path,
    assets: Path,
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Publish the weights after `step` optimizer steps and return their directory.

    `assets` is a model directory whose config is copied, and its tokenizer unless `tokenizer` is the directory of
    another; the config's dtype becomes that of the tensors, so that a reader who asks for the stored dtype gets the
    stored values.

    Raises: ArtifactError when that step exists already or the disk refuses.
    """
    dtypes: set[torch.dtype] = set()

    def noting_dtypes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            dtypes.add(tensor.dtype)
            yield name, tensor

    final = step_dir(weights_dir, step)
    with publish_dir(final) as directory:
        copy_assets(assets, directory, tokenizer=tokenizer)
        write_safetensors(noting_dtypes(), directory, max_shard_bytes=max_shard_bytes)
        if len(dtypes) == 1:
            _set_dtype(directory / "config.json", dtypes.pop())
    return final


def read_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of published weights, after their digests were checked.

    Raises: ArtifactError, before the first tensor, naming a file that is missing or damaged.
    """
    verify(directory)
    return read_safetensors(directory)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """Name `dtype` in a config.json, under the key of transformers 5 and, where it is used, the older one."""
    config = read_json(config_file)
    name = str(dtype).removeprefix("torch.")
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
