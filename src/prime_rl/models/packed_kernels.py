"""Kernels for causal attention within sequences that lie end to end in one row of tokens; none makes a mask.

A row is cut into parts, each attended by one call:

part        tokens                                            kernel
Rectangle   S sequences of L tokens                           scaled_dot_product_attention (GPU: cuDNN before others)
Ragged      neighbouring sequences of any lengths             a kernel that takes the sequences' bounds

On a Hopper GPU cuDNN needs about 0.6 of the time of torch's ragged kernel (FlashAttention 2), but plans anew for every
shape it meets. So `hybrid` gives it long sequences, padded to few lengths, and what is equal by itself; the rest, where
attention is the smaller part of the work, is ragged. Padding stands at the end, where causality hides it.

Shape suffixes: T tokens, S sequences, L length, H query heads, K key/value heads, D head size.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import groupby
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prime_rl.errors import ConfigError
from prime_rl.logs import get_logger

_logger = get_logger(__name__)

LONG: Final = 4096
"""From this length on a sequence is worth a call of its own: about 0.1 ms of a Hopper GPU a layer."""
_STEPS_PER_OCTAVE: Final = 8
_MIN_STEP: Final = 128


class Kernel(StrEnum):
    """How the trainer attends; the values of `model.attn`, and what `auto` may stand for."""

    SDPA = "sdpa"
    VARLEN = "varlen"
    HYBRID = "hybrid"
    FLASH_2 = "flash_attention_2"
    FLASH_3 = "flash_attention_3"
    FLASH_4 = "fa4"


_PACKAGES: Final = {
    Kernel.FLASH_2: ("flash_attn", "flash-attn"),
    Kernel.FLASH_3: ("flash_attn_interface", "flash-attn-3"),
    Kernel.FLASH_4: ("flash_attn.cute", "flash-attn-4"),
}
"""Module that holds `flash_attn_varlen_func`, and the package it comes with."""


def choose_kernel(attn: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for `model.attn` on `device`. A CPU has only SDPA.

    auto: FlashAttention of the GPU's generation where it is installed (4 for Blackwell, 3 for Hopper, 2 before it),
    else hybrid. Raises: ConfigError for a kernel that is not there or does not compute in `dtype`.
    """
    if device.type != "cuda":
        if attn not in ("auto", Kernel.SDPA):
            _logger.warning("model.attn %s needs an NVIDIA GPU: on this %s it is sdpa", attn, device.type)
        return Kernel.SDPA
    if dtype not in (torch.bfloat16, torch.float16):
        if attn not in ("auto", Kernel.SDPA):
            raise ConfigError(
                f"model.attn {attn} computes in 16 bits only, and model.optimization_dtype is "
                f"{str(dtype).removeprefix('torch.')}; set that to bfloat16, or model.attn to auto"
            )
        return Kernel.SDPA
    if attn == "auto":
        major = torch.cuda.get_device_capability(device)[0]
        flash = Kernel.FLASH_4 if major >= 10 else Kernel.FLASH_3 if major == 9 else Kernel.FLASH_2
        return flash if _flash_function(flash) is not None else Kernel.HYBRID
    kernel = Kernel(attn)
    if kernel in _PACKAGES and _flash_function(kernel) is None:
        module, package = _PACKAGES[kernel]
        raise ConfigError(
            f"model.attn is {attn}, but its module {module} cannot be imported; install {package}, or set attn to auto"
        )
    return kernel


@cache
def _flash_function(kernel: Kernel) -> Callable[..., Any] | None:
    try:
        module = importlib.import_module(_PACKAGES[kernel][0])
    except (ImportError, OSError):  # OSError: built for another torch or CUDA
        return None
    function: Callable[..., Any] | None = getattr(module, "flash_attn_varlen_func", None)
    return function


@cache
def _ragged_function(kernel: Kernel) -> Callable[..., Any]:
    """(q, k, v, bounds int32 [S + 1], longest) -> mixed values, all [T, heads, D]."""
    if kernel in _PACKAGES:
        function = _flash_function(kernel)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    else:
        # Imported here: it comes with an operator that no CPU can run.
        from torch.nn.attention.varlen import varlen_attn as function  # noqa: PLC0415

        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
    assert function is not None, f"choose_kernel has found {kernel}"
    known = inspect.signature(function).parameters
    causal: dict[str, Any] = {"causal": True}
    if "causal" not in known:
        causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        causal["enable_gqa"] = True

    def call(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, bounds: Tensor, longest: int) -> Tensor:
        given = dict(zip(names, (bounds, bounds, longest, longest), strict=True))
        out = function(q_THD, k_TKD, v_TKD, **{name: x for name, x in given.items() if name in known}, **causal)
        mixed: Tensor = out[0] if isinstance(out, tuple) else out
        return mixed

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """`sequences` of `length` tokens each, end to end, computed as if they had `padded` tokens.

    Example: Rectangle(sequences=1, length=5000, padded=5120)
    """

    sequences: int
    length: int
    padded: int

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        shape = (self.sequences, self.length)
        q, k, v = (x.view(*shape, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD))
        if self.padded > self.length:
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, self.padded - self.length)) for x in (q, k, v))
        # The kernels read and write tokens before heads as they lie: neither transposition copies.
        out_SHLD = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out_SHLD.transpose(1, 2)[:, : self.length].reshape(q_THD.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Neighbouring sequences of any lengths."""

    num_tokens: int
    longest: int
    bounds: Tensor
    """int32 [S + 1], on the device: where each sequence begins among the part's tokens, and where the last ends."""
    kernel: Kernel

    @classmethod
    def of(cls, seq_lens: Sequence[int], device: torch.device, kernel: Kernel) -> "Ragged":
        """A part of sequences of `seq_lens` tokens."""
        bounds = uploaded(torch.tensor([0, *seq_lens]).cumsum(0).to(torch.int32), device)
        return cls(num_tokens=sum(seq_lens), longest=max(seq_lens), bounds=bounds, kernel=kernel)

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        mixed: Tensor = _ragged_function(self.kernel)(q_THD, k_TKD, v_TKD, self.bounds, self.longest)
        return mixed


Part = Rectangle | Ragged


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the host on `device`; to a GPU it goes from pinned memory, for the host to wait for nothing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def parts_of(seq_lens: Sequence[int], device: torch.device, kernel: Kernel) -> list[Part]:
    """The parts of a row, in its order. `kernel`: any but SDPA, which pads groups of like lengths instead.

    Example: with HYBRID, lengths [300, 9000, 20, 30] -> Ragged [300], Rectangle 1 x 9000 (9216), Ragged [20, 30]
    """
    if kernel is not Kernel.HYBRID:
        return [Ragged.of(seq_lens, device, kernel)]
    parts: list[Part] = []
    waiting: list[int] = []  # short sequences since the last rectangle
    for length, alike in groupby(seq_lens):
        count = len(list(alike))
        padded = padded_length(length)
        if count * length < LONG or (length < LONG and padded != length):
            waiting += [length] * count
            continue
        if waiting:
            parts.append(Ragged.of(waiting, device, Kernel.VARLEN))
            waiting = []
        if padded == length:
            parts.append(Rectangle(sequences=count, length=length, padded=length))
        else:
            parts += [Rectangle(sequences=1, length=length, padded=padded)] * count
    if waiting:
        parts.append(Ragged.of(waiting, device, Kernel.VARLEN))
    return parts


def padded_length(length: int) -> int:
    """The next of few lengths: multiples of 128, from 2048 on eight in every doubling (at most an eighth is padding).

    Example: padded_length(5000) == 5120; padded_length(9000) == 9216; padded_length(16384) == 16384
    """
    octave = 1 << max(0, (length - 1).bit_length() - 1)
    step = max(_MIN_STEP, octave // _STEPS_PER_OCTAVE)
    return -(-length // step) * step


def causal_attention(q_SHLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor) -> Tensor:
    """SDPA of sequences of one length, by a kernel that makes no [L, L] matrix; heads are not copied for GQA."""
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    groups = q_SHLD.shape[1] // k_SKLD.shape[1]
    if q_SHLD.device.type != "cuda":
        return attend(q_SHLD, k_SKLD, v_SKLD, enable_gqa=groups > 1)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if q_SHLD.dtype not in (torch.bfloat16, torch.float16):
        # The one kernel for 32 bits that makes no matrix has no grouped heads.
        backends = [SDPBackend.EFFICIENT_ATTENTION]
        k_SKLD, v_SKLD = (x.repeat_interleave(groups, dim=1) for x in (k_SKLD, v_SKLD))
        groups = 1
    if q_SHLD.shape[-1] % 8:  # heads of no real model
        backends.append(SDPBackend.MATH)
    with sdpa_kernel(backends, set_priority=True):
        return attend(q_SHLD, k_SKLD, v_SKLD, enable_gqa=groups > 1)
