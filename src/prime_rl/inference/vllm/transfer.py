"""How weights get into vLLM's workers: our weight-transfer engine, from files or from the trainer's NCCL group.

    files:  safetensors --\
                           >-- tap (checksum of each tensor as it came) --> model.load_weights
    NCCL:   broadcasts  --/

A subclass of vLLM's own NCCL engine, registered with its factory. Where nothing is derived from the parameters they are
written in place, which takes a tenth of a second for a gigabyte; else (quantization, kernels that repack, MLA, experts)
vLLM reloads layer by layer. After both it is known what has arrived, and what was not written.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.platforms import current_platform

from prime_rl.inference.vllm.arguments import TRANSFER_BACKEND
from prime_rl.inference.vllm.compat import known_fields
from prime_rl.inference.vllm.files import Shards
from prime_rl.inference.vllm.proof import Arrivals
from prime_rl.inference.vllm.served import served_types

IN_PLACE: Final = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"})
"""Kinds of layers that compute with the parameters as they were loaded."""


class TransferEngine(NCCLWeightTransferEngine):
    """One update at a time: `start_weight_update`, `update_weights`, `finish_weight_update`; then `arrived` and
    `written` say what came."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arrived = Arrivals({})
        self.written: set[str] = set()
        """vLLM's names of the parameters that were written; empty where the model does not say."""
        self._in_place = False

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Ours: `{"shards": open files}`, or vLLM's for NCCL."""
        if "shards" in update_dict:
            return update_dict["shards"]
        return self.update_info_cls(**known_fields(self.update_info_cls, update_dict))

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**known_fields(self.init_info_cls, init_dict))

    def start_weight_update(self) -> None:
        self.arrived, self.written = Arrivals(served_types(self.model)), set()
        self._in_place = self._is_plain()
        if not self._in_place:
            super().start_weight_update()

    def finish_weight_update(self) -> None:
        if not self._in_place:
            super().finish_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        model = self.model
        tapped: Any = _Tapped(model, self)
        if isinstance(update_info, Shards):
            tapped.load_weights(update_info.tensors())
            return
        # vLLM's engine hands what it receives to `self.model.load_weights`.
        self.model = tapped
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model
        # vLLM's consumer makes streams for each transfer, and torch's allocator keeps a pool for every stream that it
        # has ever seen: a gigabyte a transfer that nobody else can have, until the caches are emptied. vLLM 0.26 does
        # not wait for its streams, either.
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def tap(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note each tensor as it comes; its checksum is computed where it will be served, without waiting."""
        for name, tensor in tensors:
            here = tensor.to(self.device, non_blocking=True)
            self.arrived.add(name, here)
            yield name, here

    def _is_plain(self) -> bool:
        if not current_platform.is_cuda():
            return False
        model = self.model
        methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
        names = {type(module).__name__ for module in model.modules()}
        return methods <= IN_PLACE and not any("MLA" in name or "Mamba" in name for name in names)


class _Tapped:
    """Stands for the model where vLLM's engine loads what it has received."""

    def __init__(self, model: Any, engine: TransferEngine) -> None:
        self._model = model
        self._engine = engine

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        written = self._model.load_weights(self._engine.tap(tensors))
        self._engine.written |= set(written or ())


def register() -> None:
    """Make vLLM know the engine, in the process that this is called in; once is enough."""
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, TransferEngine)
