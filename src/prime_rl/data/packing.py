"""Packing: samples of any length into rows of at most `seq_len` tokens. Pure; nothing is cut or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prime_rl.data.samples import NOT_SAMPLED, STREAMS, MicroBatch, TrainingBatch, TrainingSample
from prime_rl.errors import DataError


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` by bin: each goes, in the given order, into the first bin with room for it.

    Example: first_fit([3, 4, 1], capacity=4) == [[0, 2], [1]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > capacity:
            raise DataError(f"item {index} has {length} tokens, more than a row of {capacity}")
        target = next((number for number, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return bins


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


def _streams(samples: Sequence[TrainingSample | MicroBatch]) -> dict[str, NDArray[np.float32]]:
    """The optional arrays of a row; one that no sample has stays None."""
    streams = {}
    for stream in STREAMS:
        if any(getattr(sample, f"{stream}_weights") is not None for sample in samples):
            streams[f"{stream}_weights"] = np.concatenate([sample.stream_weights(stream) for sample in samples])
    references = [sample.ref_logprobs for sample in samples]
    if any(reference is not None for reference in references):
        streams["ref_logprobs"] = np.concatenate(
            [
                np.zeros(len(sample.loss_mask), np.float32) if reference is None else reference
                for sample, reference in zip(samples, references, strict=True)
            ]
        )
    return streams
