"""The C kernels of `native.c`: compiled once per machine, called on tensors' memory.

The library is built by the system's C compiler into the user's cache directory and uses torch's own OpenMP threads.
Without a compiler `load_kernels` returns None, and everything runs on torch alone.

Shape suffixes: T tokens, S sequences, H query heads, K key/value heads, D head size.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from prime_rl.logs import get_logger
from prime_rl.models.attention import PagedCache, PagedStep

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
LANES, ROWS, MAX_DIM = 16, 4, 256  # as in native.c


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where it does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return frozenset(flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()[2:])


def has_bfloat16_arithmetic() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


class _Shape(ctypes.Structure):
    """`Shape` of native.c."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("num_sequences", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("cache_bf16", ctypes.c_int64),
    ]


class Kernels:
    """The functions of the library on float32 CPU tensors. Shapes are checked by the callers' own construction."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._set_threads = library.set_threads
        self._set_threads.argtypes = [ctypes.c_int]
        self.paged_write = library.paged_write
        self.paged_write.argtypes = [pointer, integer, *[pointer] * 6]
        self.paged_attention = library.paged_attention
        self.paged_attention.argtypes = [*[pointer] * 8, integer, pointer, real, pointer]
        self._add_rms_norm = library.add_rms_norm
        self._add_rms_norm.argtypes = [integer, integer, pointer, pointer, pointer, real, pointer]
        self._norm_rotate = library.norm_rotate
        self._norm_rotate.argtypes = [*[integer] * 5, pointer, pointer, pointer, real, pointer, pointer, pointer]
        self._silu_mul = library.silu_mul
        self._silu_mul.argtypes = [integer, integer, pointer, pointer]
        self._multiply = library.multiply
        self._multiply.argtypes = [*[integer] * 3, *[pointer] * 4]
        self._sample = library.sample
        self._sample.argtypes = [integer, integer, *[pointer] * 5]
        for function in vars(self).values():
            function.restype = None

    def use_torch_threads(self) -> None:
        """Compute with as many threads as torch does now."""
        self._set_threads(torch.get_num_threads())

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float, out_TN: Tensor) -> None:
        """x += delta; out = x / rms(x) * weight."""
        delta = None if delta_TN is None else delta_TN.data_ptr()
        rows, size = x_TN.shape
        self._add_rms_norm(rows, size, x_TN.data_ptr(), delta, weight_N.data_ptr(), eps, out_TN.data_ptr())

    def norm_rotate(
        self,
        qkv_TX: Tensor,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor, float] | None,
        rotations: tuple[Tensor, Tensor],
        positions_T: Tensor,
    ) -> None:
        """Normalise and rotate queries and keys in place. `heads`: (H, H + K, D); `norms`: weights and eps."""
        q_weight, k_weight, eps = (
            (None, None, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        )
        rows, stride = qkv_TX.shape
        cos, sin = rotations
        self._norm_rotate(
            rows, stride, *heads, qkv_TX.data_ptr(), q_weight, k_weight, eps, cos.data_ptr(), sin.data_ptr(),
            positions_T.data_ptr(),
        )  # fmt: skip

    def silu_mul(self, x_T2N: Tensor, out_TN: Tensor) -> None:
        """out = silu(first half of x) * second half."""
        self._silu_mul(*out_TN.shape, x_T2N.data_ptr(), out_TN.data_ptr())

    def multiply(self, x_TN: Tensor, weight_MN: Tensor, bias_M: Tensor | None, out_TM: Tensor) -> None:
        """out = x @ weight.T + bias, of which no row depends on the others, to the last bit; all are contiguous."""
        bias = None if bias_M is None else bias_M.data_ptr()
        rows, size = x_TN.shape
        self._multiply(
            rows, size, len(weight_MN), x_TN.data_ptr(), weight_MN.data_ptr(), bias, out_TM.data_ptr()
        )  # fmt: skip

    def sample(
        self, logits_SV: Tensor, inverse_temperatures_S: Tensor, draws_S: Tensor, ids_S: Tensor, logprobs_S: Tensor
    ) -> None:
        """One token a row, as `sampler.draw` chooses it, and its logprob; overwrites the logits. `ids_S` is int64."""
        self._sample(
            *logits_SV.shape, logits_SV.data_ptr(), inverse_temperatures_S.data_ptr(), draws_S.data_ptr(),
            ids_S.data_ptr(), logprobs_S.data_ptr(),
        )  # fmt: skip


@lru_cache(maxsize=1)
def load_kernels() -> Kernels | None:
    """The compiled library; None, with one line in the log, where it cannot be built."""
    try:
        return Kernels(ctypes.CDLL(str(_build())))
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None)
        reason = stderr.strip().splitlines()[-1] if stderr and stderr.strip() else error
        logger.warning("the CPU kernels cannot be built, torch alone is used, which is slower: %s", reason)
        return None


def _build() -> Path:
    """Path of the library for this source, compiler and CPU, built when it is not there."""
    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (found := _which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang or $CC) is installed")
    openmp = _openmp_flags()
    described = " ".join([compiler, platform.machine(), *FLAGS, *openmp, *sorted(cpu_flags())])
    digest = hashlib.sha256(SOURCE.read_bytes() + described.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-rl"
    library = cache / f"native-{digest}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built = Path(scratch) / library.name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), *openmp]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        built.replace(library)
    return library


def _which(name: str | None) -> str | None:
    return shutil.which(name) if name else None


def _openmp_flags() -> list[str]:
    """Libraries to link; OpenMP is the one that torch brings, so that there is one pool of threads, not two."""
    if platform.system() != "Linux":
        return ["-lm"]
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-fopenmp", *(str(path) for path in bundled[:1]), "-lm"]


def supports(head_dim: int, block_size: int, intermediate_size: int) -> bool:
    """Whether the kernels take these sizes."""
    fits = head_dim % LANES == 0 and head_dim <= MAX_DIM and block_size % LANES == 0
    return fits and intermediate_size % LANES == 0


class Buffers:
    """Memory that is kept between steps. (Large allocations in a thread go back to the system at once, and every step
    would pay for their pages again: a quarter of its time.)"""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, rows: int, name: str, columns: int) -> Tensor:
        """A float32 [rows, columns] tensor with arbitrary content; the same memory for the same name."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < rows:
            kept = self._kept[name] = torch.empty(rows, columns)
        return kept[:rows]


class NativeAttention:
    """`PagedAttention` by the C kernels. Queries, keys and values are float32 rows, possibly inside wider ones."""

    def __init__(self, kernels: Kernels, buffers: Buffers, cache: PagedCache, num_heads: int, step: PagedStep) -> None:
        self.kernels = kernels
        self.cache = cache
        self.step = step
        _, _, kv_heads, head_dim, size = cache.keys.shape
        self._scale = head_dim**-0.5
        self._shape = _Shape(
            len(step.lengths), num_heads, kv_heads, head_dim, size, step.tables.shape[1], 0, 0, 0,
            cache.keys.dtype == torch.bfloat16,
        )  # fmt: skip
        owner_T = np.repeat(np.arange(len(step.lengths)), step.lengths)
        self._blocks = np.ascontiguousarray(step.tables[owner_T, step.positions // size])
        self._offsets = step.positions % size
        self._starts = (np.cumsum(step.lengths) - step.lengths).astype(np.int32)
        self._tiles = _tiles(step, kv_heads, num_heads // kv_heads)
        # One for all layers: a layer's output is used before the next layer attends.
        self._out_THD = buffers.take(len(owner_T), "mixed", num_heads * head_dim).view(-1, num_heads, head_dim)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        shape = self._shape
        shape.q_stride, shape.k_stride, shape.v_stride = q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0)
        keys, values = self.cache.keys[layer].data_ptr(), self.cache.values[layer].data_ptr()
        address = ctypes.addressof(shape)
        self.kernels.paged_write(
            address, q_THD.shape[0], k_TKD.data_ptr(), v_TKD.data_ptr(), keys, values,
            self._blocks.ctypes.data, self._offsets.ctypes.data,
        )  # fmt: skip
        out_THD, step = self._out_THD, self.step
        self.kernels.paged_attention(
            address, q_THD.data_ptr(), keys, values, step.tables.ctypes.data, self._starts.ctypes.data,
            step.lengths.ctypes.data, step.contexts.ctypes.data, len(self._tiles), self._tiles.ctypes.data,
            self._scale, out_THD.data_ptr(),
        )  # fmt: skip
        return out_THD


def _tiles(step: PagedStep, kv_heads: int, group: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """(sequence, kv head, first row) of every tile, int32 [tiles, 3]; a tile is ROWS rows, a row a token and head."""
    tiles_S = -(-step.lengths * group // ROWS)
    sequences = np.repeat(np.arange(len(tiles_S)), tiles_S)
    first = (np.arange(len(sequences)) - np.repeat(np.cumsum(tiles_S) - tiles_S, tiles_S)) * ROWS
    heads = np.tile(np.arange(kv_heads), len(sequences))
    return np.stack([np.repeat(sequences, kv_heads), heads, np.repeat(first, kv_heads)], axis=1).astype(np.int32)
