"""What makes forward and backward faster or smaller and changes no number: compilation, recomputation, offload.

    before, after     compiled(recomputed(...))      attention between them is neither, for kernels need no compiler and
    block.forward     offloaded(...)                 their work is not worth doing twice
    block.forward     offloaded(recomputed(...))     with ac.keep_attention = false: before and after compiled only,
                                                     once with autograd's records and once without

Methods of the blocks are replaced one by one: there is no wrapper module, so parameters keep their names, and what
hooks a block's call (FSDP) stays outside of all of it.
"""

import functools
import os
import shutil
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from prime_rl.config.trainer import ActivationCheckpointConfig, ActivationOffloadingConfig, TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.logs import get_logger
from prime_rl.models.decoder import DecoderLayer, RMSNorm
from prime_rl.models.language_model import LanguageModel
from prime_rl.models.packed_kernels import choose_kernel
from prime_rl.trainer.model.offload import ActivationOffload

_logger = get_logger(__name__)

_COMPILERS: Final = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def apply(model: LanguageModel, config: TrainerModelConfig, device: torch.device) -> None:
    """Set up `model` as configured for `device`, where its weights need not be yet. Call it once.

    The blocks' methods are bound to these blocks: a copy of the model would compute with the original's weights.
    Raises: ConfigError for what this model, machine or device cannot do.
    """
    if device.type == "cuda" and config.optimization_dtype == "float32":
        _logger.warning(
            "model.optimization_dtype is float32: this GPU's 16-bit tensor cores and fast attention kernels are not "
            "used, and servers on GPUs compute in bfloat16; set it to bfloat16, unless float32 is meant"
        )
    model.kernel = choose_kernel(config.attn, device, getattr(torch, config.optimization_dtype))
    if config.compile is not None:
        _require_compiler(device)
    is_offloaded = config.ac_offloading is not None
    ac = ActivationCheckpointConfig() if config.ac is None and is_offloaded else config.ac
    offload = _offload(config.ac_offloading, device)
    for index, block in enumerate(model.blocks):
        is_random = _is_random(block, config)
        # Recomputation inside what is compiled is planned by the compiler, which leaves out what the gradients do not
        # need (the products that end a part). But it would draw random numbers anew.
        is_planned = isinstance(block, DecoderLayer) and not is_random
        if config.compile is not None and not is_planned:
            _compile(block, fullgraph=config.compile.fullgraph)
        if ac is not None and index % ac.freq == 0:
            _recompute(block, ac, is_random=is_random)
            if offload is not None:
                _replace(block, "forward", offload.wrap)
        if config.compile is not None and is_planned:
            _compile(block, fullgraph=config.compile.fullgraph)


def _replace(module: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    setattr(module, name, change(getattr(module, name)))


def _compile(block: nn.Module, *, fullgraph: bool) -> None:
    """Compile what is around attention. Blocks of one class share their code: it is compiled for the first of them."""
    if isinstance(block, DecoderLayer):
        for name in ("before", "after"):
            _replace(block, name, functools.partial(torch.compile, fullgraph=fullgraph))
        return
    if fullgraph:
        raise ConfigError(
            "model.compile.fullgraph is true, but attention is not compiled, and it is called in the middle of a layer "
            "of `transformers`; drop fullgraph, or use an architecture that impl custom knows"
        )
    _replace(block, "forward", torch.compile)


def _require_compiler(device: torch.device) -> None:
    """Raises: ConfigError, before the first step does, where torch.compile has nothing to compile with."""
    names = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    if not any(shutil.which(name) for name in (*names, *_COMPILERS)):
        language = "C" if device.type == "cuda" else "C++"
        raise ConfigError(
            f"model.compile needs a {language} compiler on this machine, and there is none; install g++ or set CXX, or "
            "drop [model.compile]"
        )


def _is_random(block: nn.Module, config: TrainerModelConfig) -> bool:
    """Whether a layer's forward draws random numbers."""
    if config.lora is not None and config.lora.dropout > 0:
        return True
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules())


def _recompute(block: nn.Module, config: ActivationCheckpointConfig, *, is_random: bool) -> None:
    """Let `block` compute again in the backward pass what `config` says. `is_random`: with the same random numbers."""
    change = functools.partial(_recomputed, is_random=is_random)
    if not isinstance(block, DecoderLayer):
        if config.mode == "selective":
            raise ConfigError(
                "model.ac.mode selective knows the parts of our own model code only, and this model is computed by "
                "`transformers` (impl hf); set mode to full"
            )
        _replace(block, "forward", change)
    elif config.mode == "selective":
        _recompute_targets(block, set(config.targets), change)
    elif config.keep_attention:
        _replace(block, "before", change)
        _replace(block, "after", change)
    elif is_random:
        _replace(block, "forward", change)
    else:
        _replace(block, "forward", functools.partial(_whole, block))


def _recompute_targets(block: DecoderLayer, targets: set[str], change: Callable[[Any], Any]) -> None:
    if "norm" in targets:
        for part in block.modules():
            if isinstance(part, RMSNorm):
                _replace(part, "forward", change)
    if "mlp" in targets:
        _replace(block.mlp, "forward", change)
    if "attn_proj" in targets:
        _replace(block, "before", change)


def _whole(block: DecoderLayer, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of a layer, of which only the input is kept for the backward pass."""

    @functools.wraps(forward)
    def recomputed(x_TH: Tensor, *shared: Any) -> Tensor:
        anchor = None
        if not x_TH.requires_grad and any(parameter.requires_grad for parameter in block.parameters()):
            anchor = torch.empty(0, requires_grad=True)  # the first layer, with adapters, after a frozen embedding
        if not torch.is_grad_enabled() or (anchor is None and not x_TH.requires_grad):
            return forward(x_TH, *shared)
        out: Tensor = _WholeLayer.apply(forward, anchor, x_TH, *shared)
        return out

    return recomputed


class _WholeLayer(torch.autograd.Function):
    """A layer without autograd's records of it, which the backward pass makes for one layer at a time.

    As `torch.utils.checkpoint` does it, but that calls Python for every tensor that the layer saves, in both passes:
    more host time than a GPU needs for a layer of a small model. The inner backward adds up parameters' gradients.
    """

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], anchor: Tensor | None, x_TH: Tensor, *shared: Any) -> Tensor:
        """`anchor`: makes the output need a gradient where `x_TH` does not. `shared`: what all layers are given."""
        ctx.save_for_backward(x_TH)
        ctx.layer, ctx.shared = forward, shared
        return forward(x_TH.detach(), *shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TH = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[2])
        with torch.enable_grad():
            end = get_gradient_edge(ctx.layer(x_TH, *ctx.shared))  # not the output, which is of no use any more
        torch.autograd.backward(end, grads)
        return None, None, x_TH.grad, *(None for _ in ctx.shared)


def _recomputed(method: Callable[..., Any], *, is_random: bool) -> Callable[..., Any]:
    """A method of which only the arguments are kept for the backward pass."""
    if not isinstance(method, MethodType):  # compiled
        return functools.partial(checkpoint, method, use_reentrant=False, preserve_rng_state=is_random)
    return MethodType(_again(method.__func__, is_random), method.__self__)


@cache
def _again(function: Callable[..., Any], is_random: bool) -> Callable[..., Any]:
    """`function` of a module, as one function for all modules of a class: compiled code is found by it."""

    def recomputed(self: nn.Module, *args: Any, **named: Any) -> Any:
        bound = functools.partial(function, self, **named)
        return checkpoint(bound, *args, use_reentrant=False, preserve_rng_state=is_random)

    # A code object of its own: the compiler keeps a limited number of versions of each.
    recomputed.__code__ = recomputed.__code__.replace(co_name=f"{function.__name__}_again")
    return recomputed


def _offload(config: ActivationOffloadingConfig | None, device: torch.device) -> ActivationOffload | None:
    if config is None:
        return None
    if device.type != "cuda":
        _logger.warning("model.ac_offloading has no effect here: on a %s activations are in its memory", device.type)
        return None
    return ActivationOffload(device, pin_memory=config.pin_memory, max_inflight=config.max_inflight_activations)
