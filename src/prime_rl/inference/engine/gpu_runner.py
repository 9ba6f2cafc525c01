"""Computes scheduled steps on a GPU, without waiting for it.

A step is at most two passes. Sequences that decode go through one pass of fixed shape, replayed from a CUDA graph:
their tokens stay on the GPU from one step to the next, the host says only where they stand. What belongs to prompts
goes through another pass behind it. Each pass draws its tokens on the GPU; ids and logprobs of both are read back in
one copy when the step is collected.

    host    step n: one upload a pass -> launch -> | step n+1: upload -> launch -> | collect n: ids and logprobs
    GPU     ... step n-1 ...                       | ... step n ...                | ... step n+1 ...

Shape suffixes: T tokens of prompts, S sequences, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.inference.engine.gpu_edits import Tops, redraw
from prime_rl.inference.engine.gpu_memory import explained
from prime_rl.inference.engine.graphs import Graphs, batch_sizes
from prime_rl.inference.engine.runner import Launched, score_prompts
from prime_rl.inference.engine.sampler import Sampled, uniform
from prime_rl.inference.engine.scheduler import Chunk, Sequence
from prime_rl.models.decoder import Decoder
from prime_rl.models.gpu_attention import (
    QUERY_BLOCK_FIELDS,
    DecodeAttention,
    GpuCache,
    prefill_attention,
    queries_per_block,
)
from prime_rl.models.gpu_decoder import GpuDecoder, Workspace
from prime_rl.models.gpu_kernels import META_FIELDS, start_decode
from prime_rl.models.gpu_sampling import TokenSampler

IntArray = npt.NDArray[np.int32]
ALIGNMENT = 16  # int32 values: kernels are compiled for aligned addresses
NUM_IN_FLIGHT = 2


class GpuRunner:
    """Holds the decoder, the cache and, on the GPU, the block table and the last token of each running sequence."""

    looks_ahead = True

    def __init__(
        self, decoder: Decoder, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
    ) -> None:
        """Allocates all but the cache: `attach` takes that, before the first step."""
        self.decoder = decoder
        config, weight = decoder.config, decoder.model.embed_tokens.weight
        self.device = weight.device
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        # As the scheduler: every running sequence can decode in every step.
        max_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._work = Workspace(decoder, max_tokens=max_tokens, max_logits=max_num_seqs)
        self._model = GpuDecoder(decoder, self._work, max_positions=max_model_len)
        self._decode_attention = DecodeAttention(self._model.heads, self.device)
        self._sampler = TokenSampler(config.vocab_size, max_rows=max_num_seqs, device=self.device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        # The last row is that of rows which only fill a batch.
        max_blocks = -(-max_model_len // block_size)
        self._tables = integers(max_num_seqs + 1, max_blocks)
        self._last_tokens = integers(max_num_seqs + 1)
        self._out = integers(2 * max_num_seqs, 2)
        self._out_host = [
            torch.zeros(2 * max_num_seqs, 2, dtype=torch.int32).pin_memory() for _ in range(NUM_IN_FLIGHT)
        ]
        self._decode_upload = _Upload(max_num_seqs * META_FIELDS, self.device)
        # Ids, positions and places; query blocks; last tokens, table rows, tables and sampling of each sequence.
        per_sequence = 2 * QUERY_BLOCK_FIELDS + 2 + max_blocks + META_FIELDS
        self._prompt_upload = _Upload(
            (3 + QUERY_BLOCK_FIELDS) * max_tokens + per_sequence * max_num_seqs + 8 * ALIGNMENT, self.device
        )
        self._constants = _Constants([])
        self._turn = 0
        self._cache: GpuCache
        self._graphs: Graphs

    @torch.inference_mode()
    def attach(self, cache: GpuCache, *, eager: bool) -> None:
        """Use `cache`, whose last block is scratch for rows that only fill a batch; capture the graphs."""
        self._cache = cache
        self._scratch_block = cache.keys.shape[1] - 1
        self._decode_upload.put([self._filler(self._max_num_seqs)], turn=0)
        self._graphs = Graphs(self._decode, batch_sizes(self._max_num_seqs), eager=eager)

    def _filler(self, rows: int) -> IntArray:
        """Rows that fill a batch: they write to the scratch block and to the last row of what belongs to sequences."""
        filler = np.zeros((rows, META_FIELDS), dtype=np.int32)
        filler[:, 0] = self._max_num_seqs
        filler[:, 3] = self._scratch_block
        filler[:, 5] = np.float32(1.0).view(np.int32)
        return filler

    @torch.inference_mode()
    def launch(self, chunks: Seq[Chunk]) -> Launched:
        """Queue the computation of all chunks; nothing here waits for the GPU."""
        with explained("computing a step"):
            return self._launch(chunks)

    def _launch(self, chunks: Seq[Chunk]) -> Launched:
        self._turn = (self._turn + 1) % NUM_IN_FLIGHT
        decodes = [chunk for chunk in chunks if _is_decode(chunk)]
        prompts = [chunk for chunk in chunks if not _is_decode(chunk)] if len(decodes) < len(chunks) else []
        tops: list[Tops] = []
        if decodes:
            tops += self._decode_pass(decodes)
        if prompts:
            tops += self._prompt_pass(prompts, len(decodes))
        drawn = [chunk.sequence for chunk in (*decodes, *prompts) if chunk.samples]
        host = self._out_host[self._turn][: len(drawn)]
        host.copy_(self._out[: len(drawn)], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Launched(sequences=drawn, collect=partial(_collect, event, host, tops))

    def _decode_pass(self, chunks: list[Chunk]) -> list[Tops]:
        rows, size = len(chunks), self._graphs.size_for(len(chunks))
        sequences = [chunk.sequence for chunk in chunks]
        if self._constants.sequences != sequences:
            self._constants = _Constants(sequences)
        meta = _meta(chunks, self._constants)
        block_size = self._block_size
        meta[:, 1:4] = [
            (s.tokens[at] if at < len(s.tokens) else -1, at, s.blocks[at // block_size])
            for s, at in [(chunk.sequence, chunk.start) for chunk in chunks]
        ]
        self._decode_upload.put([np.concatenate([meta, self._filler(size - rows)])], turn=self._turn)
        self._graphs(rows)
        return redraw(chunks, self._work.logits, self._last_tokens, self._out, 0)

    def _decode(self, size: int) -> None:
        """The pass that is captured: one token of each of `size` rows, from their meta data to drawn tokens."""
        work = self._work
        meta = self._decode_upload.device[: size * META_FIELDS].view(size, META_FIELDS)
        positions, places = work.positions[:size], work.places[:size]
        start_decode(
            meta, self._last_tokens, self._tables, self.decoder.model.embed_tokens.weight, work.x[:size],
            positions, places, block_size=self._block_size,
        )  # fmt: skip

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            self._decode_attention(qkv, keys, values, self._tables, meta, out)

        hidden_SH = self._model(positions, places, self._cache, attend)
        self._sampler(self._model.logits(hidden_SH), meta, self._last_tokens, self._out[:size])

    def _prompt_pass(self, chunks: list[Chunk], first_row: int) -> list[Tops]:
        """Compute pieces of prompts; draw for those that are complete, the first as row `first_row` of the step."""
        drawn = [chunk for chunk in chunks if chunk.samples]
        ids, positions, places, query_blocks, last, rows, tables, meta = self._prompt_upload.put(
            [*self._prompt_arrays(chunks), _meta(drawn, _Constants([chunk.sequence for chunk in drawn]))],
            turn=self._turn,
        )
        work = self._work
        if len(rows):
            self._tables[rows.long(), : tables.numel() // len(rows)] = tables.view(len(rows), -1)
        torch.index_select(self.decoder.model.embed_tokens.weight, 0, ids, out=work.x[: len(ids)])

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, mixed: Tensor) -> None:
            blocks = query_blocks.view(-1, QUERY_BLOCK_FIELDS)
            prefill_attention(qkv, keys, values, self._tables, blocks, mixed, self._model.heads)

        hidden_TH = self._model(positions, places, self._cache, attend)
        score_prompts(chunks, hidden_TH, self._model.logits, self._max_num_seqs)
        if not drawn:
            return []
        logits_SV, out = self._model.logits(hidden_TH.index_select(0, last)), self._out[first_row:]
        self._sampler(logits_SV, meta.view(-1, META_FIELDS), self._last_tokens, out)
        return redraw(drawn, logits_SV, self._last_tokens, out, first_row)

    def _prompt_arrays(self, chunks: list[Chunk]) -> list[IntArray]:
        """What the pass over prompts is told, in the order in which `_prompt_pass` unpacks it."""
        size, queries = self._block_size, queries_per_block(self._model.heads)
        ids: list[int] = []
        positions, places, query_blocks = [], [], []
        for chunk in chunks:
            s, first = chunk.sequence, len(ids)
            assert chunk.start + chunk.length <= len(s.tokens), "a prompt's tokens are known"
            ids += s.tokens[chunk.start : chunk.start + chunk.length]
            position = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
            positions.append(position)
            places.append(np.array(s.blocks, dtype=np.int32)[position // size] * size + position % size)
            starts = np.arange(0, chunk.length, queries, dtype=np.int32)
            row = np.full_like(starts, s.row)
            query_blocks.append(np.stack([row, first + starts, chunk.start + starts, chunk.length - starts], axis=1))
        lengths = np.cumsum([chunk.length for chunk in chunks], dtype=np.int32)
        drawn = np.array([chunk.samples for chunk in chunks])
        new = [c.sequence for c in chunks if c.sequence.num_blocks_in_table < len(c.sequence.blocks)]
        tables = np.zeros((len(new), max((len(s.blocks) for s in new), default=0)), dtype=np.int32)
        for row, s in zip(tables, new, strict=True):
            row[: len(s.blocks)] = s.blocks
            s.num_blocks_in_table = len(s.blocks)
        return [
            np.array(ids, dtype=np.int32),
            np.concatenate(positions),
            np.concatenate(places),
            np.concatenate(query_blocks),
            lengths[drawn] - 1,
            np.array([s.row for s in new], dtype=np.int32),
            tables,
        ]

    @torch.inference_mode()
    def swap_weights(self, swap: Callable[[], None]) -> None:
        """Run `swap`; whoever reads the weights next, on whatever thread or stream, reads the new ones."""
        swap()
        torch.cuda.synchronize(self.device)


def _is_decode(chunk: Chunk) -> bool:
    """Whether a chunk is one token of a sequence whose table is on the GPU, and draws the next.

    A newcomer's single token is no such chunk: it may need what a prompt of the same step writes.
    """
    return chunk.samples and chunk.length == 1 and chunk.sequence.num_blocks_in_table > 0


def _collect(event: torch.cuda.Event, host_S2: Tensor, tops: list[Tops]) -> Sampled | None:
    """Wait for a step and read what it drew."""
    event.synchronize()
    if not len(host_S2):
        return None
    ids, bits = np.ascontiguousarray(host_S2.numpy().T)
    logprobs = bits.view(np.float32)
    if np.isnan(logprobs).any():
        raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinite values")
    return Sampled(
        token_ids=ids.tolist(),
        logprobs=logprobs.tolist(),
        top_logprobs={row: pairs for top in tops for row, pairs in top.arrived().items()},
        undrawn=frozenset(np.flatnonzero(np.isinf(logprobs)).tolist()),
    )


class _Constants:
    """What stays the same of a set of sequences from step to step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.seeds = np.array([s.seed for s in sequences], dtype=np.uint64)
        temperatures = np.array([s.sampling.temperature for s in sequences], dtype=np.float64)
        self.greedy = temperatures == 0.0
        # Greedy rows report the distribution at temperature 1. A scale beyond float32 is one that leaves the likeliest.
        scales = 1.0 / np.where(self.greedy, 1.0, temperatures)
        self.scales = np.minimum(scales, np.finfo(np.float32).max).astype(np.float32)


def _meta(chunks: list[Chunk], constants: _Constants) -> IntArray:
    """What the kernels are told of each row, [S, META_FIELDS], but for where a decoding one stands."""
    indices = np.array([chunk.index for chunk in chunks], dtype=np.uint64)
    draws = np.where(constants.greedy, np.float32(-1.0), uniform(constants.seeds, indices))
    meta = np.zeros((len(chunks), META_FIELDS), dtype=np.int32)
    meta[:, 0] = [chunk.sequence.row for chunk in chunks]
    meta[:, 4] = draws.view(np.int32)
    meta[:, 5] = constants.scales.view(np.int32)
    return meta


class _Upload:
    """Arrays of integers on their way to fixed places on the GPU, in one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        # A copy may still be under way while the next step's is written.
        self._host = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(NUM_IN_FLIGHT)]

    def put(self, arrays: list[IntArray], *, turn: int) -> list[Tensor]:
        """The arrays on the GPU, flat, in the same order, behind one another from the beginning of `device`."""
        host = self._host[turn]
        buffer, places, end = host.numpy(), [], 0
        for array in arrays:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + array.size
            buffer[start:end] = array.reshape(-1)
            places.append((start, end))
        self.device[:end].copy_(host[:end], non_blocking=True)
        return [self.device[start:end] for start, end in places]
