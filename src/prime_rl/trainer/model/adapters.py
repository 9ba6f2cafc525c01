"""LoRA (arXiv 2106.09685): low-rank adapters that are trained instead of the model's matrices.

    y = x W^T + b + scale * dropout(x) A^T B^T,    scale = alpha / rank,    A [rank, in], B [out, rank]

W keeps its Hugging Face name and is frozen; A and B are parameters beside it, `<module>.lora_A` and `<module>.lora_B`.
With B = 0 at the start the model is the one that was loaded. Modules in `modules_to_save` are trained whole.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from prime_rl.config.trainer import LoRAConfig
from prime_rl.errors import ConfigError
from prime_rl.models.language_model import LanguageModel
from prime_rl.models.lora import AdapterConfig

HEAD: Final = "lm_head"
_SHOWN: Final = 12
"""Names that an error tells."""


class LoRALinear(nn.Linear):
    """A linear layer, frozen, and its adapter. Has the parameters of the layer that it replaces, as they are."""

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.lora_A = nn.Parameter(self.weight.new_empty(config.rank, base.in_features))
        self.lora_B = nn.Parameter(self.weight.new_empty(base.out_features, config.rank))
        self.scale = config.alpha / config.rank
        self.dropout = config.dropout

    def forward(self, input: Tensor) -> Tensor:
        base = F.linear(input, self.weight, self.bias)
        reduced = F.linear(F.dropout(input, self.dropout, self.training), self.lora_A)
        # One product that adds to what is there: a sum of its own would read and write all of it once more.
        out = torch.addmm(base.flatten(0, -2), reduced.flatten(0, -2), self.lora_B.t(), alpha=self.scale)
        return out.view_as(base)


def add_adapters(model: LanguageModel, config: LoRAConfig) -> None:
    """Replace the target modules, and freeze all that is not trained. Values are not touched; `model` may be on meta.

    Raises: ConfigError for a name that matches nothing, or something that cannot have an adapter.
    """
    linears, whole = _linears(model), _saved_modules(model, config)
    targets = [name for name in linears if _matches_any(name, config.target_modules)]
    _check_targets(model, config, targets, whole)
    for name in targets:
        parent, attribute = linears[name]
        setattr(parent, attribute, LoRALinear(getattr(parent, attribute), config))
    for name, parameter in model.named_parameters():
        is_whole = any(name.startswith(f"{module}.") for module in whole)
        parameter.requires_grad_(is_whole or _is_factor(name))


def initial_adapter_tensors(model: LanguageModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    """First values of all factors by name, whole, float32 on the CPU: A uniform in +-1/sqrt(in), as PEFT has it; B 0.

    Each A is drawn from the seed and its own name, so it does not depend on what else is adapted.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
            yield name, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif name.endswith(".lora_B"):
            yield name, torch.zeros(parameter.shape)


def adapter_config(model: LanguageModel, config: LoRAConfig) -> AdapterConfig:
    """What `adapter_config.json` says of the adapters that `add_adapters` has put into `model`."""
    names = _linears(model)
    adapted = {
        name for name, (parent, attribute) in names.items() if isinstance(getattr(parent, attribute), LoRALinear)
    }
    short = {name.rpartition(".")[2] for name in adapted}
    # Short names, which every reader of adapters knows, where they say it; else those of all modules.
    is_short = all(name in adapted for name in names if name.rpartition(".")[2] in short)
    saved = _saved_modules(model, config)
    if tied_embedding(model).rpartition(".")[0] in saved:
        saved = [*saved, HEAD]
    return AdapterConfig(
        rank=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        target_modules=tuple(sorted(short if is_short else adapted)),
        modules_to_save=tuple(saved),
    )


def tied_embedding(model: LanguageModel) -> str:
    """The name of the embedding that is the head too; "" where the head is one of its own.

    PEFT gives a head that is tied to an embedding in `modules_to_save` weights of its own, so they must be named twice.
    """
    head = next((name for name, parameter in model.named_parameters() if parameter is model.head_weight), "")
    return "" if head == f"{HEAD}.weight" else head


def _is_factor(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _linears(model: LanguageModel) -> dict[str, tuple[nn.Module, str]]:
    """Every linear layer by Hugging Face's name, which its parameter's tells: its parent, and its name in there."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[nn.Module, str]] = {}
    for parent in model.modules():
        for attribute, child in parent.named_children():
            if isinstance(child, nn.Linear) and (name := names.get(id(child.weight))) is not None:
                found[name.removesuffix(".weight")] = parent, attribute
    return found


def _saved_modules(model: LanguageModel, config: LoRAConfig) -> list[str]:
    """Modules that are trained whole, none inside another. Raises: ConfigError for a name that matches nothing."""
    modules = [*dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters() if not _is_factor(name))]
    for pattern in config.modules_to_save:
        if not any(_matches(name, pattern) for name in modules):
            raise ConfigError(
                f"model.lora.modules_to_save: {pattern!r} is no module of the model that has weights of its own "
                f"(a tied head is its embedding); it has {_shown(modules)}"
            )
    return [name for name in modules if _matches_any(name, config.modules_to_save)]


def _check_targets(model: LanguageModel, config: LoRAConfig, targets: Sequence[str], whole: Sequence[str]) -> None:
    """Raises: ConfigError as `add_adapters`."""
    linears = _linears(model)
    heads = {
        name for name, (parent, attribute) in linears.items() if getattr(parent, attribute).weight is model.head_weight
    }
    usual = LoRAConfig.model_fields["target_modules"].default
    for pattern in config.target_modules:
        if pattern not in usual and not any(_matches(name, pattern) for name in linears):
            raise ConfigError(
                f"model.lora.target_modules: {pattern!r} is no linear layer of the model; it has "
                f"{_shown(linears.keys() - heads)}"
            )
    if heads.intersection(targets):
        raise ConfigError(
            f"model.lora.target_modules takes in {', '.join(heads)}, which cannot have an adapter (vLLM serves none "
            "there); name other modules, or train it whole: model.lora.modules_to_save"
        )
    if both := sorted(set(targets).intersection(whole)):
        raise ConfigError(f"model.lora: {_shown(both)} in both target_modules and modules_to_save; choose one of them")
    if not targets:
        raise ConfigError(
            f"model.lora.target_modules matches nothing in the model, which has {_shown(linears.keys() - heads)}; name "
            "some of them"
        )


def _matches_any(module: str, patterns: Sequence[str]) -> bool:
    return any(_matches(module, pattern) for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    """Whether `pattern` is the module's name, the last parts of it, or a regular expression of all of it."""
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ConfigError(
            f"model.lora: {pattern!r} is neither a module's name nor a regular expression: {error}"
        ) from None


def _shown(names: Iterable[str]) -> str:
    """Kinds of modules: the last parts of their names."""
    kinds = sorted({name.rpartition(".")[2] for name in names})
    return ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
