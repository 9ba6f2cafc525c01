"""The files of a weights directory, all of them open before the first tensor is written. No vllm.

The trainer keeps the newest directories only, so one may be deleted while a server reads it. An open file outlives its
name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from prime_rl.errors import ModelError
from prime_rl.models.hf import weight_files


class Shards:
    """Open, mapped files; they are closed when the object goes. Raises: ModelError, OSError for what cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._files: list[tuple[Path, Any]] = []
        for path in weight_files(directory):
            try:
                self._files.append((path, safe_open(path, framework="pt")))
            except SafetensorError as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
        if not self._files:
            raise ModelError(f"{directory} holds no weights (any more)")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor, on the CPU, one at a time."""
        for path, file in self._files:
            try:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
