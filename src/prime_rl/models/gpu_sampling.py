"""Drawing one token a row from logits on a GPU, in Triton, in one pass over the vocabulary.

As on the CPU, a draw is the inverse of the cumulative distribution at a number that the caller gives. The first kernel
sums the vocabulary in chunks; the second finds the chunk that the draw falls into and reads that one again.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: PLR0913, PLR0917 (a kernel is told of its memory and sizes one by one)

import torch
import triton
import triton.language as tl
from torch import Tensor

from prime_rl.models.gpu_kernels import META_FIELDS, power_of_2

CHUNK = 4096


@triton.jit
def _sum_chunks(
    logits, meta, highest, total, likeliest, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    slot, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = tl.load(meta + slot * FIELDS + 5).to(tl.float32, bitcast=True)
    v = chunk * WIDTH + tl.arange(0, WIDTH)
    logit = tl.load(logits + slot * VOCAB + v, mask=v < VOCAB, other=float("-inf")).to(tl.float32)
    top, at = tl.max(logit, 0, return_indices=True)
    tl.store(highest + slot * CHUNKS + chunk, top)
    tl.store(likeliest + slot * CHUNKS + chunk, chunk * WIDTH + at)
    tl.store(total + slot * CHUNKS + chunk, tl.sum(tl.exp((logit - top) * scale), 0))


@triton.jit
def _draw(
    logits, meta, highest, total, likeliest, last_tokens, out, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_WIDTH: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(meta + slot * FIELDS).to(tl.int64)
    draw = tl.load(meta + slot * FIELDS + 4).to(tl.float32, bitcast=True)
    scale = tl.load(meta + slot * FIELDS + 5).to(tl.float32, bitcast=True)
    c = tl.arange(0, CHUNKS_WIDTH)
    tops = tl.load(highest + slot * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    top, top_chunk = tl.max(tops, 0, return_indices=True)
    sums = tl.load(total + slot * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp((tops - top) * scale)
    whole = tl.sum(sums, 0)
    target = draw * whole
    passed = tl.cumsum(sums, 0) <= target
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, sums, 0.0), 0)

    v = chunk * WIDTH + tl.arange(0, WIDTH)
    logit = tl.load(logits + slot * VOCAB + v, mask=v < VOCAB, other=float("-inf")).to(tl.float32)
    weight = tl.exp((logit - top) * scale)
    reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    first = tl.min(tl.where(reached, v, VOCAB), 0)
    # The two ways of summing may differ in the last bit, so that none is reached: then it is the last possible one.
    last = tl.max(tl.where(weight > 0, v, 0), 0)
    token = tl.where(first < VOCAB, first, last)
    token = tl.where(draw < 0, tl.load(likeliest + slot * CHUNKS + top_chunk), token)
    chosen = tl.load(logits + slot * VOCAB + token).to(tl.float32)
    logprob = (chosen - top) * scale - tl.log(whole)
    tl.store(out + slot * 2, token)
    tl.store(out + slot * 2 + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(last_tokens + row, token)


class TokenSampler:
    """Holds the scratch space of up to `max_rows` rows."""

    def __init__(self, vocab_size: int, *, max_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.num_chunks = -(-vocab_size // CHUNK)
        self._highest, self._total = (torch.empty(max_rows * self.num_chunks, device=device) for _ in range(2))
        self._likeliest = torch.empty(max_rows * self.num_chunks, dtype=torch.int32, device=device)

    def __call__(self, logits_SV: Tensor, meta_SF: Tensor, last_tokens: Tensor, out_S2: Tensor) -> None:
        """Write each row's token and the bits of its logprob to int32 `out_S2`, and the token to `last_tokens`.

        `meta_SF` as `gpu_kernels.META_FIELDS` says. A row whose logits are not all finite gets a logprob of NaN.
        """
        assert logits_SV.is_contiguous()
        rows, scratch = len(logits_SV), (self._highest, self._total, self._likeliest)
        _sum_chunks[(rows, self.num_chunks)](
            logits_SV, meta_SF, *scratch, VOCAB=self.vocab_size, CHUNKS=self.num_chunks, WIDTH=CHUNK,
            FIELDS=META_FIELDS, num_warps=8,
        )  # fmt: skip
        _draw[(rows,)](
            logits_SV, meta_SF, *scratch, last_tokens, out_S2, VOCAB=self.vocab_size, CHUNKS=self.num_chunks,
            CHUNKS_WIDTH=power_of_2(self.num_chunks), WIDTH=CHUNK, FIELDS=META_FIELDS, num_warps=8,
        )  # fmt: skip
