"""Whether a model serves what arrived, parameter by parameter. No vllm."""

from collections.abc import Mapping

import torch
from torch import Tensor

from prime_rl.errors import InferenceError
from prime_rl.inference.vllm.expected import named
from prime_rl.transport.checksum import Tally
from prime_rl.transport.manifest import TensorEntry


class Arrivals:
    """Notes the tensors of an update as they come, on the device that will serve them, without waiting for it."""

    def __init__(self, types: Mapping[str, torch.dtype]) -> None:
        """`types`: those that are served."""
        self.came = Tally()
        self._converted = Tally()
        """Of those that came in another type than the served one: the same in that."""
        self._types = types

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor as it is now."""
        self.came.add(name, tensor)
        served = self._types.get(name, tensor.dtype)
        if served != tensor.dtype:
            self._converted.add(name, tensor.to(served))

    def prove(self, served: Mapping[str, TensorEntry]) -> None:
        """Raises: InferenceError naming parameters for which nothing came, or that are something else."""
        expected = self.came.entries() | self._converted.entries()
        if missing := sorted(served.keys() - expected.keys()):
            raise InferenceError(f"{len(missing)} parameters got no weights: {named(missing)}")
        wrong = sorted(name for name, entry in served.items() if not _is_same(entry, expected[name]))
        if wrong:
            raise InferenceError(f"{len(wrong)} parameters are not what arrived: {named(wrong)}")


def _is_same(one: TensorEntry, other: TensorEntry) -> bool:
    return (one.dtype, one.checksum) == (other.dtype, other.checksum)
