"""vLLM's LoRA on CPUs, so that a request without an adapter is computed without one.

Its kernels in torch take the adapter of row i by `weights[index[i]]`. A row without an adapter has the index -1, so
that beside rows with one it is given the last adapter there is (`vllm/lora/ops/torch_ops/lora_ops.py`, 0.26 to 0.29;
the kernels for GPUs look for -1). Requests in flight when the first adapter comes are such rows: their tokens would not
be of the weights that the server says.

To be removed when `bgmv_shrink` leaves rows of index -1 without an effect; `tests/contract/test_adapters.py` tells.
"""

import functools
import importlib
from typing import Any

PLACES = (
    "vllm.lora.ops.torch_ops.lora_ops",
    "vllm.lora.ops.torch_ops",
    "vllm.lora.punica_wrapper.punica_cpu",
)
"""Modules that know the function by its name."""


def patch() -> None:
    """Mend the kernel in this process. To be called before a model is loaded."""
    modules: list[Any] = [importlib.import_module(name) for name in PLACES]
    original = modules[0].bgmv_shrink

    @functools.wraps(original)
    def bgmv_shrink(
        inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
    ) -> None:
        original(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        without = (lora_indices_tensor < 0).expand(len(output_tensor))
        output_tensor[without] = 0  # what the second matrix makes of zeros is added to the output

    for module in modules:
        assert module.bgmv_shrink is original, f"{module.__name__} has another bgmv_shrink"
        module.bgmv_shrink = bgmv_shrink
