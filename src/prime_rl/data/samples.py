"""Wire structs between the orchestrator and the trainer, and the invariants that make them safe to train on.

Arrays are numpy so that the control plane needs no torch. Shape legend: T tokens, S sequences. Every struct
checks itself when it is built, and so also when it is decoded from a file: a batch that exists is valid.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from prime_rl.errors import DataError

NOT_SAMPLED: Final = -1
"""Version of a token that no policy sampled (prompt, tool output, SFT data)."""

Stream = Literal["rl", "ce", "ref_kl"]
"""What a token may be trained on: policy gradient, cross-entropy, and KL to a reference (distillation)."""

STREAMS: Final[tuple[Stream, ...]] = get_args(Stream)

# Engines compute log-softmax in float32, so a certain token's logprob may be a rounding error above zero.
LOGPROB_TOLERANCE: Final = 1e-4


class ArrayStruct(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A struct whose fields may be numpy arrays; two are equal when all values, shapes and dtypes are."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    return bool(left == right)


def _check_array(
    owner: str, name: str, array: np.ndarray, dtype: type[np.generic], length: int | None, *, gaps: bool = False
) -> None:
    """`gaps`: whether NaN may stand for a value that is not known."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise DataError(f"{owner}: {name} must be a one-dimensional {np.dtype(dtype)} array, not {found}")
    if length is not None and len(array) != length:
        raise DataError(f"{owner}: {name} has {len(array)} entries for {length} tokens")
    if array.dtype.kind == "f" and not (np.isfinite(array) | (gaps & np.isnan(array))).all():
        index = int(np.flatnonzero(~np.isfinite(array))[0])
        raise DataError(f"{owner}: {name}[{index}] is {array[index]}")


class _Streamed(ArrayStruct, frozen=True, kw_only=True, eq=False):
    """Tokens with a loss mask, and which streams of the loss each is in.

    Weights are None where no token differs from the default: `rl` 1 on the loss mask, `ce` and `ref_kl` 0. A token is
    in a stream where its weight is not 0, and in the loss mask where it is in any.

    Example: loss_mask [F, T, T], ce_weights [0, 0, 0.1], rl_weights [0, 1, 0] -> stream_tokens rl 1, ce 1, ref_kl 0
    """

    loss_mask: NDArray[np.bool_]
    """[T] True: trained on. False at the first token of a sequence, which nothing predicts."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[T] of each token under a reference policy; NaN where it was not asked, which `ref_kl_weights` must leave out."""
    rl_weights: NDArray[np.float32] | None = None
    """[T] factor of each token's policy-gradient loss."""
    ce_weights: NDArray[np.float32] | None = None
    """[T] factor of each token's cross-entropy."""
    ref_kl_weights: NDArray[np.float32] | None = None
    """[T] factor of each token's KL to the reference."""

    def stream_weights(self, stream: Stream) -> NDArray[np.float32]:
        """[T] float32, 0 outside the loss mask."""
        weights: NDArray[np.float32] | None = getattr(self, f"{stream}_weights")
        if weights is not None:
            return weights
        return self.loss_mask.astype(np.float32) if stream == "rl" else np.zeros(len(self.loss_mask), np.float32)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens in any stream."""
        return int(self.loss_mask.sum())

    @property
    def stream_tokens(self) -> dict[Stream, int]:
        """Tokens of each stream; one in two streams counts in both."""
        return {stream: int(np.count_nonzero(self.stream_weights(stream))) for stream in STREAMS}

    def num_without_reference(self, stream: Stream) -> int:
        """Tokens of a stream whose logprob under the reference is not known."""
        in_stream = self.stream_weights(stream) != 0
        known = np.zeros_like(in_stream) if self.ref_logprobs is None else ~np.isnan(self.ref_logprobs)
        return int((in_stream & ~known).sum())

    def _check_streams(self, owner: str) -> None:
        num_tokens = len(self.loss_mask)
        for stream in STREAMS:
            if (array := getattr(self, f"{stream}_weights")) is not None:
                _check_array(owner, f"{stream}_weights", array, np.float32, num_tokens)
        in_any = np.zeros(num_tokens, np.bool_)
        for stream in STREAMS:
            weights = self.stream_weights(stream)
            if num_tokens and weights.min() < 0:
                raise DataError(f"{owner}: {stream}_weights contains {weights.min()}; a weight is never negative")
            in_any |= weights != 0
        if (wrong := np.flatnonzero(in_any != self.loss_mask)).size:
            told = "in the loss mask but in no stream" if self.loss_mask[wrong[0]] else "outside the loss mask"
            raise DataError(f"{owner}: by its weights (rl, ce, ref_kl), token {wrong[0]} is {told}")
        if self.ref_logprobs is not None:
            _check_array(owner, "ref_logprobs", self.ref_logprobs, np.float32, num_tokens, gaps=True)
            if (self.ref_logprobs > LOGPROB_TOLERANCE).any():
                raise DataError(f"{owner}: ref_logprobs contains {np.nanmax(self.ref_logprobs)}, above 0")
        if self.num_without_reference("ref_kl"):
            raise DataError(f"{owner}: it has ref_kl_weights where it has no ref_logprobs, so nothing to compare to")


class TrainingSample(_Streamed, frozen=True, kw_only=True, eq=False):
    """One sequence of a rollout, with what the trainer must know of every token.

    Example: prompt [5, 9], sampled [7, 2] by weights 3 ->
        token_ids [5, 9, 7, 2], loss_mask [F, F, T, T], logprobs [0, 0, -0.1, -1.2], versions [-1, -1, 3, 3]
    """

    token_ids: NDArray[np.int32]
    """[T]"""
    logprobs: NDArray[np.float32]
    """[T] of the sampled token under the policy that sampled it, at the sampling temperature; 0 elsewhere."""
    versions: NDArray[np.int32]
    """[T] weights version that produced the token; NOT_SAMPLED elsewhere."""
    temperature: float
    advantage: float
    reward: float
    env_name: str
    rollout_id: str

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises: DataError naming the rollout, the field and the offending value."""
        owner = f"sample of rollout {self.rollout_id!r} ({self.env_name})"
        _check_array(owner, "token_ids", self.token_ids, np.int32, None)
        num_tokens = len(self.token_ids)
        if num_tokens == 0:
            raise DataError(f"{owner}: it has no tokens")
        if self.token_ids.min() < 0:
            raise DataError(f"{owner}: token_ids contains {self.token_ids.min()}")
        _check_array(owner, "loss_mask", self.loss_mask, np.bool_, num_tokens)
        _check_array(owner, "logprobs", self.logprobs, np.float32, num_tokens)
        _check_array(owner, "versions", self.versions, np.int32, num_tokens)
        if self.loss_mask[0]:
            raise DataError(f"{owner}: the first token is in the loss, but nothing predicts it")
        self._check_streams(owner)
        sampled = self.versions >= 0
        for stream in ("rl", "ref_kl"):
            if (self.stream_weights(stream).astype(np.bool_) & ~sampled).any():
                raise DataError(
                    f"{owner}: a token is in the {stream} loss but has no version, so no policy sampled it; "
                    "only ce takes such tokens"
                )
        if self.logprobs[~sampled].any():
            raise DataError(f"{owner}: a token that no policy sampled has a logprob")
        if self.logprobs.max() > LOGPROB_TOLERANCE:
            raise DataError(f"{owner}: logprobs contains {self.logprobs.max()}, above 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise DataError(f"{owner}: temperature is {self.temperature}; training needs one above 0")
        for name in ("advantage", "reward"):
            if not math.isfinite(getattr(self, name)):
                raise DataError(f"{owner}: {name} is {getattr(self, name)}")


class MicroBatch(_Streamed, frozen=True, kw_only=True, eq=False):
    """Sequences packed end to end into one row; documents never see each other and positions restart at each.

    Example: sequences of 3 and 2 tokens -> T = 5, seq_lens [3, 2], positions [0, 1, 2, 0, 1]
    """

    input_ids: NDArray[np.int32]
    """[T]"""
    advantages: NDArray[np.float32]
    """[T]"""
    inference_logprobs: NDArray[np.float32]
    """[T] 0 outside the loss mask for SFT, and where nothing was sampled."""
    temperatures: NDArray[np.float32]
    """[T] the logits that predict token i are divided by temperatures[i]."""
    seq_lens: NDArray[np.int32]
    """[S] sums to T."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises: DataError naming the field and the offending value."""
        owner = "micro-batch"
        _check_array(owner, "input_ids", self.input_ids, np.int32, None)
        num_tokens = len(self.input_ids)
        _check_array(owner, "loss_mask", self.loss_mask, np.bool_, num_tokens)
        _check_array(owner, "advantages", self.advantages, np.float32, num_tokens)
        _check_array(owner, "inference_logprobs", self.inference_logprobs, np.float32, num_tokens)
        _check_array(owner, "temperatures", self.temperatures, np.float32, num_tokens)
        _check_array(owner, "seq_lens", self.seq_lens, np.int32, None)
        if len(self.seq_lens) == 0 or self.seq_lens.min() < 1 or self.seq_lens.sum() != num_tokens:
            raise DataError(f"{owner}: seq_lens {self.seq_lens.tolist()} do not add up to {num_tokens} tokens")
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        if self.loss_mask[starts].any():
            raise DataError(f"{owner}: the first token of a sequence is in the loss, but nothing predicts it")
        self._check_streams(owner)
        if self.temperatures.min() <= 0:
            raise DataError(f"{owner}: temperatures contains {self.temperatures.min()}; training needs one above 0")

    @classmethod
    def dummy(cls, num_tokens: int = 2) -> MicroBatch:
        """One sequence with nothing in the loss, for a rank that must keep step with others but has nothing to do."""
        zeros = np.zeros(num_tokens, np.float32)
        return cls(
            input_ids=np.zeros(num_tokens, np.int32),
            loss_mask=np.zeros(num_tokens, np.bool_),
            advantages=zeros,
            inference_logprobs=zeros,
            temperatures=np.ones(num_tokens, np.float32),
            seq_lens=np.array([num_tokens], np.int32),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def positions(self) -> NDArray[np.int32]:
        """[T] index of each token within its own sequence."""
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        return (np.arange(self.num_tokens) - np.repeat(starts, self.seq_lens)).astype(np.int32)

    @property
    def sequences(self) -> NDArray[np.int32]:
        """[T] which sequence each token belongs to."""
        return np.repeat(np.arange(len(self.seq_lens), dtype=np.int32), self.seq_lens)


class TrainingBatch(ArrayStruct, frozen=True, kw_only=True, eq=False):
    """Everything one optimizer step consumes; each stream of its loss is normalised by its `stream_tokens`."""

    step: int
    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    """Tokens in any stream."""
    min_version: int
    """Oldest weights version that sampled a token of the batch; NOT_SAMPLED when none did (SFT)."""
    max_version: int

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises: DataError naming the batch and the contradiction."""
        owner = f"batch {self.step}"
        if self.step < 0:
            raise DataError(f"{owner}: a step is never negative")
        if not self.micro_batches:
            raise DataError(f"{owner}: it has no micro-batches")
        counted = sum(micro_batch.num_loss_tokens for micro_batch in self.micro_batches)
        if counted != self.num_loss_tokens:
            raise DataError(f"{owner}: num_loss_tokens is {self.num_loss_tokens}, its masks hold {counted}")
        if not NOT_SAMPLED <= self.min_version <= self.max_version:
            raise DataError(f"{owner}: versions {self.min_version} to {self.max_version} are not a range")

    @property
    def stream_tokens(self) -> dict[Stream, int]:
        """Tokens of each stream over all micro-batches."""
        counts = [micro_batch.stream_tokens for micro_batch in self.micro_batches]
        return {stream: sum(count[stream] for count in counts) for stream in STREAMS}

    @property
    def num_tokens(self) -> int:
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)

    @property
    def num_sequences(self) -> int:
        return sum(len(micro_batch.seq_lens) for micro_batch in self.micro_batches)
