"""What our server asks of vLLM's workers (`--worker-extension-cls`): take weights, prove it, tell what is served.

vLLM mixes the class into its own worker. Importing this module, which vLLM does in each worker before it loads a model,
registers our weight-transfer engine: vLLM has no other moment for it.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from prime_rl.errors import InferenceError, ModelError
from prime_rl.inference.vllm import cpu_lora, transfer
from prime_rl.inference.vllm.expected import named
from prime_rl.inference.vllm.files import Shards
from prime_rl.inference.vllm.served import served_tensors, without_adapters
from prime_rl.logs import get_logger
from prime_rl.transport.checksum import combined, entries

transfer.register()
if current_platform.is_cpu():
    cpu_lora.patch()

logger = get_logger(__name__)


class WeightsExtension:
    """Methods that the server calls on every worker. Names begin with `prime_rl`, for vLLM's own must not be hidden."""

    weight_transfer_engine: transfer.TransferEngine
    vllm_config: Any
    model_runner: Any
    _prime_rl_shards: Shards | None = None

    def prime_rl_open_weights(self, directory: str | None) -> dict[str, str]:
        """Open the files of a directory, so that nothing can take them away between two tensors: `{}`, or `{"error":
        why}` with nothing changed. None: close those that are open."""
        self._prime_rl_shards = None
        try:
            self._prime_rl_shards = None if directory is None else Shards(Path(directory))
        except (ModelError, OSError) as error:
            return {"error": str(error)}
        return {}

    def prime_rl_take_weights(self, announced: dict[str, Any] | None, digest: str | None) -> dict[str, str]:
        """Load what is `announced` by NCCL, or the open files where nothing is: `{"digest": of what came}`.

        `{"error": why}` when that is not `digest`, or when a parameter is not what came; the model is not to be used
        then. Errors are answers here: where several workers raise one, vLLM's executor takes the second worker's for
        the answer to its next question.
        """
        try:
            return {"digest": self._prime_rl_take(announced, digest)}
        except Exception as error:
            logger.exception("The weights were not taken")
            return {"error": str(error) or type(error).__name__}
        finally:
            self._prime_rl_shards = None

    def _prime_rl_take(self, announced: dict[str, Any] | None, digest: str | None) -> str:
        worker: Any = self
        with without_adapters(self.model_runner.get_model()):
            worker.start_weight_update()
            worker.update_weights({"shards": self._prime_rl_shards} if announced is None else announced)
            worker.finish_weight_update()
            came = self.weight_transfer_engine.arrived.came.entries()
            found = combined(came)
            if digest is not None and found != digest:
                raise InferenceError(f"what arrived has the digest {found}, what was published {digest}")
            self._prime_rl_check(came)
        return found

    def _prime_rl_check(self, came: dict[str, Any]) -> None:
        """Every parameter was written; where parameters can be read back, they hold exactly what came."""
        engine = self.weight_transfer_engine
        model: torch.nn.Module = self.model_runner.get_model()
        if engine.written:
            kinds = {_kind(name) for name in came}  # scales that quantization derives come from nowhere
            names = {name for name, _ in model.named_parameters() if _kind(name) in kinds}
            unwritten = sorted(names - engine.written)
            if unwritten:
                raise InferenceError(f"{len(unwritten)} parameters got no weights: {named(unwritten)}")
        if self._prime_rl_why_unreadable() is not None:
            return
        with torch.inference_mode():
            engine.arrived.prove(entries(dict(served_tensors(model))))

    def prime_rl_add_adapter(self, name: str, number: int, directory: str) -> dict[str, str]:
        """Load an adapter, beside those that there are: `{}`, or `{"error": why}`."""
        worker: Any = self
        try:
            is_added = worker.add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=directory))
        except Exception as error:
            logger.warning("The adapter %s was not added", directory, exc_info=True)
            return {"error": str(error) or type(error).__name__}
        return {} if is_added else {"error": "vLLM has not added it"}

    def prime_rl_checksums(self) -> dict[str, Any]:
        """`{"tensors": Hugging Face name -> checksum of what this worker serves}`, or `{"error": why}`."""
        try:
            return {"tensors": self._prime_rl_read()}
        except InferenceError as error:
            return {"error": str(error)}

    def _prime_rl_read(self) -> dict[str, str]:
        reason = self._prime_rl_why_unreadable()
        if reason is not None:
            raise InferenceError(f"the tensors that vLLM serves cannot be read back one by one: {reason}")
        model = self.model_runner.get_model()
        with torch.inference_mode(), without_adapters(model):
            served = entries(dict(served_tensors(model)))
        return {name: entry.checksum for name, entry in served.items()}

    def _prime_rl_why_unreadable(self) -> str | None:
        parallel = self.vllm_config.parallel_config
        if parallel.world_size > 1:
            return f"{parallel.world_size} GPUs hold a part each (tensor parallel)"
        if self.vllm_config.model_config.quantization is not None:
            return f"they are quantized ({self.vllm_config.model_config.quantization})"
        model = self.model_runner.get_model()
        if any(parameter.ndim > 2 for _, parameter in model.named_parameters()):
            return "its experts are joined"
        return None


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
