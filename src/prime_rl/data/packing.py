"""Samples of any length into rows of at most `seq_len` tokens, and a batch dealt to the ranks that train on it.

Pure and deterministic; nothing is cut or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prime_rl.data.balance import CostModel, balanced, first_fit
from prime_rl.data.samples import NOT_SAMPLED, STREAMS, MicroBatch, TrainingBatch, TrainingSample
from prime_rl.errors import DataError


def pack(samples: Sequence[TrainingSample], seq_len: int) -> list[MicroBatch]:
    """Pack samples first-fit-decreasing into micro-batches of at most `seq_len` tokens.

    First-fit-decreasing needs at most 11/9 of the fewest possible rows (Johnson 1973). Deterministic:
    samples of equal length keep their order.

    Raises: DataError for a sample over `seq_len`; the caller drops and counts such rollouts before.
    """
    for sample in samples:
        if len(sample.token_ids) > seq_len:
            raise DataError(
                f"sample of rollout {sample.rollout_id!r} ({sample.env_name}) has {len(sample.token_ids)} "
                f"tokens, more than seq_len = {seq_len}; raise seq_len or lower max_tokens"
            )
    ordered = sorted(samples, key=lambda sample: -len(sample.token_ids))
    bins = first_fit([len(sample.token_ids) for sample in ordered], seq_len)
    return [_concatenate([ordered[index] for index in members]) for members in bins]


def build_batch(samples: Sequence[TrainingSample], *, step: int, seq_len: int) -> TrainingBatch:
    """Pack the samples of one step and count what the trainer normalises and checks by."""
    micro_batches = pack(samples, seq_len)
    versions = np.concatenate([sample.versions for sample in samples]) if samples else np.empty(0, np.int32)
    sampled = versions[versions >= 0]
    return TrainingBatch(
        step=step,
        micro_batches=micro_batches,
        num_loss_tokens=sum(micro_batch.num_loss_tokens for micro_batch in micro_batches),
        min_version=int(sampled.min()) if len(sampled) else NOT_SAMPLED,
        max_version=int(sampled.max()) if len(sampled) else NOT_SAMPLED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A batch as its ranks train on it.

    Example, 2 ranks: rows [[a, d], [b, c]] -> rank 0 computes a while rank 1 computes b, then d beside c.
    """

    rows: list[list[MicroBatch]]
    """By rank, as many for each. Those at one index are computed at the same time and cost about the same."""
    metrics: dict[str, float]
    """`balance/fill`: share of the capacity of all rows that holds tokens. `balance/idle`: share of the ranks' time
    spent waiting for the slowest, by the cost model. `balance/dummies`: rows without a token of the batch."""


def deal(batch: TrainingBatch, num_ranks: int, capacity: int, cost: CostModel) -> Dealt:
    """Every document of the batch to one rank, in rows of at most `capacity` tokens.

    A single rank takes the rows of the batch as they are. For several, documents are packed anew into the fewest rows
    that every rank has as many of, so that the slowest row of each micro-step is as fast as can be found. The same
    arguments give the same rows on every rank: nobody needs to send them.

    Raises: DataError for a document longer than `capacity`.
    """
    if num_ranks == 1:
        fill = batch.num_tokens / (len(batch.micro_batches) * capacity)
        metrics = {"balance/fill": fill, "balance/idle": 0.0, "balance/dummies": 0.0}
        return Dealt(rows=[list(batch.micro_batches)], metrics=metrics)
    documents = _join(batch.micro_batches)
    lengths = documents.seq_lens.astype(np.int64)
    if lengths.max() > capacity:
        raise DataError(
            f"batch {batch.step} holds a sequence of {lengths.max()} tokens, more than a row of {capacity}; "
            "raise the trainer's model.seq_len"
        )
    loss_tokens = np.add.reduceat(documents.loss_mask.astype(np.int64), np.cumsum(lengths) - lengths)
    bins, loads = balanced(lengths, cost.relative(lengths, loss_tokens), num_ranks, capacity)
    rows = [_take(documents, members) if members else MicroBatch.dummy() for members in bins]
    micro_steps = [rows[start : start + num_ranks] for start in range(0, len(rows), num_ranks)]
    # In every other micro-step the order is turned around, so that no rank has the longest row of all.
    micro_steps = [row if index % 2 == 0 else row[::-1] for index, row in enumerate(micro_steps)]
    slowest = sum(loads[::num_ranks])
    metrics = {
        "balance/fill": batch.num_tokens / (len(rows) * capacity),
        "balance/idle": 1 - sum(loads) / (num_ranks * slowest),
        "balance/dummies": float(sum(not members for members in bins)),
    }
    return Dealt(rows=[list(column) for column in zip(*micro_steps, strict=True)], metrics=metrics)


def _join(rows: Sequence[MicroBatch]) -> MicroBatch:
    """Rows put end to end."""
    names = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "temperatures", "seq_lens")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    return MicroBatch(**arrays, **_streams(rows))


def _take(row: MicroBatch, sequences: Sequence[int]) -> MicroBatch:
    """Some sequences of a row, put end to end."""
    ends = np.cumsum(row.seq_lens)
    tokens = np.concatenate([np.arange(ends[index] - row.seq_lens[index], ends[index]) for index in sequences])
    arrays = {name: getattr(row, name) for name in row.__struct_fields__ if name != "seq_lens"}
    taken: dict[str, Any] = {name: None if array is None else array[tokens] for name, array in arrays.items()}
    return MicroBatch(**taken, seq_lens=row.seq_lens[np.asarray(sequences)])


def _concatenate(samples: Sequence[TrainingSample]) -> MicroBatch:
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int32)
    return MicroBatch(
        input_ids=np.concatenate([sample.token_ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        advantages=np.repeat(np.array([sample.advantage for sample in samples], np.float32), lengths),
        inference_logprobs=np.concatenate([sample.logprobs for sample in samples]),
        temperatures=np.repeat(np.array([sample.temperature for sample in samples], np.float32), lengths),
        seq_lens=lengths,
        **_streams(samples),
    )


def _streams(samples: Sequence[TrainingSample | MicroBatch]) -> dict[str, Any]:
    """The optional arrays of a row; one that no sample has stays None."""
    streams: dict[str, Any] = {}
    for stream in STREAMS:
        if any(getattr(sample, f"{stream}_weights") is not None for sample in samples):
            streams[f"{stream}_weights"] = np.concatenate([sample.stream_weights(stream) for sample in samples])
    references = [sample.ref_logprobs for sample in samples]
    if any(reference is not None for reference in references):
        streams["ref_logprobs"] = np.concatenate(
            [
                np.full(len(sample.loss_mask), np.nan, np.float32) if reference is None else reference
                for sample, reference in zip(samples, references, strict=True)
            ]
        )
    return streams
