"""LoRA adapters in PEFT's files: read, checked, merged into weights, written. Pure functions of tensors.

`adapter_config.json` beside `adapter_model.safetensors`, whose tensors are, for every adapted matrix W [out, in],

    base_model.model.<module>.lora_A.weight  [rank, in]
    base_model.model.<module>.lora_B.weight  [out, rank]

    W' = W + scale * B A,    scale = alpha / rank, or with rank-stabilised LoRA alpha / sqrt(rank)

What would change the result and is not part of this (DoRA, trained biases or whole modules, patterns of ranks, ...) is
refused, never ignored.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from prime_rl.errors import ModelError

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_SUFFIXES: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "peft_type": ("LORA",),
    "rank_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "use_dora": (None, False),
}
"""Keys of adapter_config.json -> the values with which an adapter is what this module computes."""
_CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda")
"""Initialisations after which the base is no longer the model that the adapter names."""

Factors = dict[str, tuple[Tensor, Tensor]]
"""Module, such as `model.layers.0.self_attn.q_proj`, -> A [rank, in] and B [out, rank]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Example: AdapterConfig(rank=16, alpha=32.0, target_modules=("q_proj", "v_proj"))"""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    """Last parts of the adapted modules' names; or, as PEFT has it, a regular expression of their names, or
    `all-linear`."""
    use_rslora: bool = False
    dropout: float = 0.0
    """In training alone."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that come whole beside the factors; PEFT alone can load such an adapter."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def adapts(self, module: str) -> bool:
        """Whether the module is one that the adapter may have factors for."""
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or re.fullmatch(self.target_modules, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)


def is_adapter(directory: Path) -> bool:
    """Whether the directory holds an adapter."""
    return (directory / CONFIG_FILE).is_file() and (directory / WEIGHTS_FILE).is_file()


def read_config(directory: Path) -> AdapterConfig:
    """Raises: ModelError naming the file and the key that cannot be used."""
    path = directory / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    for key, neutral in _REFUSED.items():
        if content.get(key) not in neutral:
            raise ModelError(
                f"{path}: {key} = {content.get(key)!r} is not supported; merge the adapter into its model "
                "(peft's merge_and_unload) and use the result"
            )
    if str(content.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights = {content['init_lora_weights']!r} changes the base model; save the adapter "
            "with peft's path_initial_model_for_weight_conversion"
        )
    return _checked_config(path, content)


def _checked_config(path: Path, content: Mapping[str, Any]) -> AdapterConfig:
    rank, alpha, targets = (content.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{path}: r must be a whole number of at least 1, got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{path}: lora_alpha must be a number, got {alpha!r}")
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ModelError(f"{path}: target_modules = {targets!r} is no regular expression: {error}") from error
    elif isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets):
        targets = tuple(targets)
    else:
        raise ModelError(f"{path}: target_modules must be a list of module names or a string, got {targets!r}")
    rslora = content.get("use_rslora") or False
    return AdapterConfig(rank=rank, alpha=float(alpha), target_modules=targets, use_rslora=bool(rslora))


def write_config(config: AdapterConfig, directory: Path, *, base_model: str) -> None:
    """Write `adapter_config.json` as PEFT and vLLM read it. `base_model`: name or directory of the adapted model."""
    targets = config.target_modules
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "use_rslora": config.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": list(config.modules_to_save) or None,
        "lora_dropout": config.dropout,
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def adapter_tensors(factors: Factors, saved: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Factors under PEFT's names, and the parameters `saved` of modules that come whole."""
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in (saved or {}).items()}
    for module, pair in factors.items():
        for suffix, index in _SUFFIXES.items():
            tensors[f"{_PREFIX}{module}{suffix}"] = pair[index]
    return tensors


def factors_of(config: AdapterConfig, tensors: Mapping[str, Tensor]) -> Factors:
    """The tensors of an adapter by module.

    Raises: ModelError naming a tensor that is none of an adapter of this config, or one that is missing.
    """
    pairs: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise ModelError(f"adapter tensor {name} is none of a LoRA of linear layers, {_PREFIX}...lora_A.weight")
        module, index = name.removeprefix(_PREFIX).removesuffix(suffix), _SUFFIXES[suffix]
        if not config.adapts(module):
            raise ModelError(f"adapter tensor {name} is of no module in target_modules = {config.target_modules!r}")
        if tensor.ndim != 2 or tensor.shape[index] != config.rank:
            raise ModelError(
                f"adapter tensor {name} has shape {tuple(tensor.shape)}, which is not of rank r = {config.rank}"
            )
        pairs.setdefault(module, {})[index] = tensor
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ModelError(f"the adapter has only one of lora_A and lora_B for {module}")
    if not pairs:
        raise ModelError("the adapter holds no tensors")
    return {module: (pair[0], pair[1]) for module, pair in pairs.items()}


def merge(base: Iterable[tuple[str, Tensor]], config: AdapterConfig, factors: Factors) -> Iterator[tuple[str, Tensor]]:
    """All of `base`, under Hugging Face names, with the adapted matrices as new float32 tensors.

    The tensors of `base` are not changed, so whoever keeps them can take the adapter out again.

    Raises: ModelError for a module that the model has not, or has in another shape; at the end for the former.
    """
    left = dict(factors)
    for name, tensor in base:
        pair = left.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
        if pair is None:
            yield name, tensor
            continue
        in_RI, out_OR = pair
        if tensor.shape != (len(out_OR), in_RI.shape[1]):
            raise ModelError(
                f"the adapter's factors for {name} make a matrix of {(len(out_OR), in_RI.shape[1])}, "
                f"the model's is {tuple(tensor.shape)}"
            )
        yield name, torch.addmm(tensor.float(), out_OR.float(), in_RI.float(), alpha=config.scale)
    if left:
        raise ModelError(f"the adapter changes modules that the model has not: {', '.join(sorted(left)[:5])}")
