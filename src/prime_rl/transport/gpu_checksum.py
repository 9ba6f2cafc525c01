"""The checksum of `transport.checksum` on a GPU, in Triton: one launch for a tensor, which is read once.

Triton comes with PyTorch's CUDA builds; import this module only where it is.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit(do_not_specialize=["at", "count", "first"])  # or it would be compiled anew where one is 1, or n times 16
def _add(words, totals, at, count, first, offset, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    values = tl.load(words + i, mask=mask, other=0).to(tl.int64) + offset
    terms = tl.where(mask, values * (2 * (first + i) + 1), 0)
    tl.atomic_add(totals + at, tl.sum(terms, 0))  # integers that wrap: in any order the same


def add_checksum(words: Tensor, totals: Tensor, at: int, *, first: int, offset: int) -> None:
    """totals[at] += sum_i (words[i] + offset) * (2 (first + i) + 1) mod 2^64, on the current stream.

    `words`: contiguous integers; `totals`: int64.
    """
    count = words.numel()
    if count:
        _add[(triton.cdiv(count, BLOCK),)](words, totals, at, count, first, offset, BLOCK=BLOCK, num_warps=WARPS)
