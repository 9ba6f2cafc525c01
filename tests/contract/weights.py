"""New weights for a server, published as the trainer does it, and their checksums, computed here from the files."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from prime_rl.transport.weights import publish_weights
from tests.contract.model import make_tokenizer, weights

WORD_OFFSET = 0x9E3779B1


class Publisher:
    """The trainer's side: directories `step_N` under a root."""

    def __init__(self, model: Path, root: Path) -> None:
        self._model = model
        self._root = root

    def publish(self, step: int, tensors: Mapping[str, Tensor]) -> Path:
        return publish_weights(tensors.items(), step=step, weights_dir=self._root, assets=self._model)

    def other(self, step: int) -> Path:
        """Weights that have nothing random in common with any others."""
        return self.publish(step, weights(make_tokenizer(), seed=1000 + step))

    def nudged(self, step: int) -> Path:
        """The first weights, with every parameter changed by an amount of its own."""
        tensors = weights(make_tokenizer(), seed=0)
        names = sorted(tensors)
        assert names[0] != names[-1]
        return self.publish(step, {name: tensor + 0.01 * (1 + names.index(name)) for name, tensor in tensors.items()})


def checksums(directory: Path) -> dict[str, str]:
    """Of every tensor of a model directory, by the formula of `transport.checksum` over the bytes in the file."""
    blob = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        words = np.frombuffer(blob[start:end], dtype="<i4").astype(np.int64).view(np.uint64) + np.uint64(WORD_OFFSET)
        odd = np.arange(1, 2 * words.size, 2, dtype=np.uint64)
        found[name] = f"{int((words * odd).sum(dtype=np.uint64)):016x}"
    return found
