"""Administration of the embedded engine: read, check, swap between two steps, prove that every tensor arrived.

    directory --load_weights: digests--> tensors --adapters: merged into the first model--> fit to the parameters
        --> between two steps: copy, then compare the checksums of the parameters --> served

Everything that can be refused is refused before the swap. What goes wrong in it ends the engine: nothing half-loaded is
ever served.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from prime_rl.errors import InferenceError
from prime_rl.inference.backend import Backend
from prime_rl.models import lora
from prime_rl.models.hf import fitting
from prime_rl.transport.api import InitTransferRequest, ServedWeights
from prime_rl.transport.checksum import Tally, checksum, entries
from prime_rl.transport.manifest import TensorEntry
from prime_rl.transport.weights import LoadedWeights, load_weights

STARTED_WITH = ServedWeights(version=0, digest=None)


class EmbeddedAdministration:
    """Implements `Administration` over a `Backend`."""

    def __init__(
        self, backend: Backend, *, first: Callable[[], Iterable[tuple[str, Tensor]]], recompute: bool = False
    ) -> None:
        """`first` gives the tensors of the model that the server was started with, each time it is called.
        `recompute`: running requests' keys and values are computed anew after an update."""
        self.instance = secrets.token_hex(8)
        self.lock = asyncio.Lock()
        self._backend = backend
        self._first = first
        self._recompute = recompute
        self._served = STARTED_WITH
        self._dtypes: dict[str, torch.dtype] = {}  # as published, where the engine holds a wider one

    def failure(self) -> str | None:
        return self._backend.stats().error

    def served(self) -> ServedWeights:
        return self._served

    def paused(self) -> bool:
        return self._backend.stats().paused

    async def update(self, directory: Path, version: int) -> ServedWeights:
        loaded, swap = await asyncio.to_thread(self._prepare_update, directory)
        await self._backend.update_weights(swap.run, version, recompute=self._recompute)
        self._served = ServedWeights(version=version, digest=loaded.published.digest)
        self._dtypes = swap.dtypes()
        return self._served

    async def reload(self) -> ServedWeights:
        swap = await asyncio.to_thread(lambda: _Swap(self._backend.weights(), self._first(), {}))
        await self._backend.update_weights(swap.run, 0, recompute=self._recompute)
        self._served, self._dtypes = STARTED_WITH, {}
        return self._served

    async def tensors(self) -> dict[str, str]:
        """Parameters that the engine holds in a wider dtype than was published are told in the published one."""
        found = await asyncio.to_thread(self._tally)
        return {name: entry.checksum for name, entry in found.items()}

    def _tally(self) -> dict[str, TensorEntry]:
        tally = Tally()
        for name, tensor in self._backend.weights().items():
            tally.add(name, tensor.to(self._dtypes.get(name, tensor.dtype)))
        return tally.entries()

    async def pause(self) -> None:
        await self._backend.pause()

    async def resume(self) -> None:
        await self._backend.resume()

    async def open_transfer(self, request: InitTransferRequest) -> None:
        raise InferenceError(
            "the embedded engine takes its weights from files; set weight_broadcast.type = 'filesystem', or serve with "
            "backend = 'vllm'"
        )

    def _prepare_update(self, directory: Path) -> tuple[LoadedWeights, "_Swap"]:
        """Raises: ArtifactError, ModelError for anything that cannot be served."""
        weights = self._backend.weights()
        on_gpu = any(tensor.is_cuda for tensor in weights.values())
        loaded = load_weights(directory, pin_memory=on_gpu)
        if loaded.published.kind == "model":
            return loaded, _Swap(weights, loaded.tensors.items(), loaded.published.tensors)
        config = lora.read_config(directory)
        merged = lora.merge(self._first(), config, lora.factors_of(config, loaded.tensors))
        return loaded, _Swap(weights, merged, {})


class _Swap:
    """Tensors that fit the parameters, and the checksums that these must have afterwards."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        published: Mapping[str, TensorEntry],
    ) -> None:
        """`published`: checksums of the tensors, where known. Raises: ModelError where the tensors do not fit."""
        self._parameters = parameters
        self._tensors = dict(fitting(parameters, tensors))
        self._expected: dict[str, str] = {}
        for name, tensor in self._tensors.items():
            dtype = parameters[name].dtype
            known = name in published and tensor.dtype == dtype
            self._expected[name] = published[name].checksum if known else checksum(tensor.to(dtype))

    def run(self) -> None:
        """Copy and compare. Raises: InferenceError for a parameter that is not what it should be."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._tensors[name], non_blocking=True)
        found = entries(self._parameters)
        wrong = [name for name, entry in found.items() if entry.checksum != self._expected[name]]
        if wrong:
            raise InferenceError(
                f"{len(wrong)} of {len(found)} tensors differ from what was published after they were copied into the "
                f"engine, first {wrong[0]}; this is a defect of memory or of prime-rl, please report it"
            )

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of every tensor as it was given."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}
