"""Computes one scheduled step: arrays from chunks, the decoder over the block cache, one sampled token a sequence."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from prime_rl.inference.engine.sampler import Sampled, Sampler
from prime_rl.inference.engine.scheduler import Chunk, Sequence
from prime_rl.models.attention import Attention, PagedAttention, PagedCache, PagedStep
from prime_rl.models.decoder import Decoder
from prime_rl.models.fused import FusedDecoder
from prime_rl.models.native import Buffers, Kernels, NativeAttention, supports


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that is computed, or queued to be."""

    sequences: list[Sequence]
    """Those that a token is drawn for."""
    collect: Callable[[], Sampled | None]
    """Waits for the step and returns what was drawn, None where `sequences` is empty. Steps are collected in order."""


class Runner(Protocol):
    """What the engine needs of whoever computes its steps. `CpuRunner` and `GpuRunner` implement it."""

    decoder: Decoder
    looks_ahead: bool
    """Whether a step may be launched before the one before it is collected; at most one."""

    def launch(self, chunks: Seq[Chunk]) -> Launched:
        """Compute all chunks, after those of earlier steps."""
        ...

    def swap_weights(self, swap: Callable[[], None]) -> None:
        """Run `swap`, which writes the decoder's parameters in place; every launched step is collected before."""
        ...


def score_prompts(
    chunks: Seq[Chunk], hidden_TH: Tensor, logits: Callable[[Tensor], Tensor], max_rows: int | None = None
) -> None:
    """Let the requests of a step that asked for their prompts' logprobs take the hidden states of their tokens."""
    first = 0
    for chunk in chunks:
        if chunk.sequence.scorer is not None:
            chunk.sequence.scorer.take(chunk.start, hidden_TH[first : first + chunk.length], logits, max_rows)
        first += chunk.length


class CpuRunner:
    """Holds the decoder, the cache and the block table of the running sequences. Knows nothing of requests' ends."""

    looks_ahead = False

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        kernels: Kernels | None = None,
        deterministic: bool = False,
    ) -> None:
        """`kernels`, for a decoder on the CPU: used where they take the model's sizes. `deterministic`: no token's
        numbers depend on what is computed beside it or on how its step was cut, to the last bit; float32 weights."""
        self.decoder = decoder
        self.cache = cache
        self.sampler = Sampler(cache.keys.device, kernels, row_by_row=deterministic)
        self._deterministic = deterministic
        max_blocks = -(-max_model_len // cache.block_size)
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._model: Decoder | FusedDecoder = decoder
        self._attention: Callable[[PagedStep], Attention] = partial(PagedAttention, cache)
        self._one_by_one = deterministic
        """Whether every token is computed in a step of its own: torch's products depend on the number of rows."""
        shape = decoder.config
        if kernels is not None and supports(shape.head_dim, cache.block_size, shape.intermediate_size):
            buffers = Buffers()
            self._model = FusedDecoder(decoder, kernels, buffers, max_positions=max_model_len, row_by_row=deterministic)
            self._attention = partial(NativeAttention, kernels, buffers, cache, shape.num_heads)
            self._one_by_one = False

    @torch.inference_mode()
    def launch(self, chunks: Seq[Chunk]) -> Launched:
        """Compute all chunks and draw the tokens, before it returns."""
        hidden_TH = self._hidden(chunks)
        score_prompts(chunks, hidden_TH, self._logits, max_rows=1 if self._deterministic else None)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sequences:
            return Launched(sequences=[], collect=lambda: None)
        if len(sequences) < len(hidden_TH):
            last = np.cumsum([chunk.length for chunk in chunks]) - 1
            hidden_TH = hidden_TH[torch.from_numpy(last[np.array([chunk.samples for chunk in chunks])])]
        sampled = self.sampler.sample(self._logits(hidden_TH), sequences)
        return Launched(sequences=sequences, collect=lambda: sampled)

    def _hidden(self, chunks: Seq[Chunk]) -> Tensor:
        """Final hidden states [T, H] of all tokens of the chunks."""
        if self._one_by_one and sum(chunk.length for chunk in chunks) > 1:
            each = (Chunk(chunk.sequence, chunk.start + i, 1) for chunk in chunks for i in range(chunk.length))
            return torch.cat([self._hidden([one]) for one in each])
        ids_T, step = self._arrays(chunks)
        positions_T = torch.from_numpy(step.positions.astype(np.int64))
        return self._model(ids_T, positions_T, self._attention(step))

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        if self._one_by_one:
            return torch.cat([self._model.logits(hidden_H[None].clone()) for hidden_H in hidden_TH])
        return self._model.logits(hidden_TH)

    def _arrays(self, chunks: Seq[Chunk]) -> tuple[Tensor, PagedStep]:
        """Token ids [T] of the step, and where its tokens stand."""
        ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        contexts: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            sequence, start, length = chunk.sequence, chunk.start, chunk.length
            if length == 1:
                ids.append(sequence.tokens[start])
                positions.append(start)
            else:
                ids += sequence.tokens[start : start + length]
                positions += range(start, start + length)
            lengths.append(length)
            contexts.append(start + length)
            rows.append(sequence.row)
            if sequence.num_blocks_in_table < len(sequence.blocks):
                first = sequence.num_blocks_in_table
                self._tables[sequence.row, first : len(sequence.blocks)] = sequence.blocks[first:]
                sequence.num_blocks_in_table = len(sequence.blocks)
        step = PagedStep(
            lengths=np.array(lengths, dtype=np.int32),
            contexts=np.array(contexts, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            tables=self._tables[rows],
        )
        return torch.tensor(ids, dtype=torch.int64), step

    @torch.inference_mode()
    def swap_weights(self, swap: Callable[[], None]) -> None:
        """Run `swap`, which writes the decoder's parameters in place."""
        swap()
