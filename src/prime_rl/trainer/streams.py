"""What flows through a training step: a micro-batch on the device, the streams a loss sees, its result.

Only tokens in the loss pass through the head. Shape suffixes: T tokens of the packed row, N tokens in the
loss.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from prime_rl.data.samples import MicroBatch, Stream, TrainingBatch
from prime_rl.logs import get_logger

_logger = get_logger(__name__)


class BatchSource(Protocol):
    """Where batches come from. Of several ranks, the first waits, and then all take the same batch."""

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Block until batch `step` is there, and call `idle` now and then meanwhile."""

    def next(self, step: int) -> TrainingBatch:
        """Batch `step`, after `wait` for it has returned on any rank; steps come in their order, each once."""


class LoggedBatches:
    """The batches of another source, the first sequence of each logged as text."""

    def __init__(self, source: BatchSource, tokenizer: PreTrainedTokenizerFast) -> None:
        self._source = source
        self._tokenizer = tokenizer

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """As the other source."""
        self._source.wait(step, idle)

    def next(self, step: int) -> TrainingBatch:
        """As the other source."""
        batch = self._source.next(step)
        row = batch.micro_batches[0]
        text = self._tokenizer.decode(row.input_ids[: row.seq_lens[0]].tolist())
        _logger.info("Batch %d begins with %r", step, text)
        return batch


class Seekable(Protocol):
    """Data of which a run that goes on must know how far it was."""

    def position(self) -> bytes:
        """Behind the batch that was taken last."""

    def seek(self, position: bytes) -> None:
        """Go on from there; before the first batch. Raises: DataError where it is of other data."""


class SeekableBatches(BatchSource, Seekable, Protocol):
    """Both."""


class PreparedBatches:
    """The batches of a source that waits for nobody, each made in a thread while the model trains on the one before.

    Rendering conversations takes a core for 5 to 10 seconds per million tokens.
    """

    def __init__(self, source: SeekableBatches, *, num_steps: int | None) -> None:
        """`num_steps`: of the run, beyond which nothing is made. None: it has no end."""
        self._source = source
        self._num_steps = num_steps
        self._position = source.position()
        self._coming: Future[tuple[TrainingBatch, bytes]] | None = None

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Nothing to wait for."""

    def next(self, step: int) -> TrainingBatch:
        """As the other source, whose errors come with the step that they belong to."""
        batch, self._position = (self._coming or self._begin(step)).result()
        assert batch.step == step, (batch.step, step)
        is_last = self._num_steps is not None and step + 1 >= self._num_steps
        self._coming = None if is_last else self._begin(step + 1)
        return batch

    def position(self) -> bytes:
        """As the source's, behind the batch that was taken; the source is ahead of that."""
        return self._position

    def seek(self, position: bytes) -> None:
        """As the source."""
        assert self._coming is None, "nothing is made before the first batch is asked for"
        self._source.seek(position)
        self._position = position

    def _begin(self, step: int) -> Future[tuple[TrainingBatch, bytes]]:
        coming: Future[tuple[TrainingBatch, bytes]] = Future()

        def make() -> None:
            try:
                coming.set_result((self._source.next(step), self._source.position()))
            except BaseException as error:  # noqa: BLE001 (raised where the batch is asked for)
                coming.set_exception(error)

        # A daemon: a process that ends does not wait for a batch that nobody will train on.
        threading.Thread(target=make, name=f"batch {step}", daemon=True).start()
        return coming


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One micro-batch as tensors. Token i is predicted by the hidden state of token i - 1.

    Example: one sequence [5, 9, 7, 2] with the last two in the loss -> predictors_N [1, 2], targets_N [7, 2]
    """

    input_ids_T: Tensor
    positions_T: Tensor
    seq_lens: list[int]
    predictors_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    advantages_N: Tensor
    inference_logprobs_N: Tensor
    ref_logprobs_N: Tensor | None
    rl_weights_N: Tensor
    ce_weights_N: Tensor
    ref_kl_weights_N: Tensor
    sequence_N: Tensor

    @classmethod
    def from_numpy(cls, batch: MicroBatch, device: torch.device) -> "DeviceBatch":
        """Upload a micro-batch. To a GPU this waits for nothing: the host prepares rows while it computes others."""
        in_loss_N = np.flatnonzero(batch.loss_mask)

        def ints(array: np.ndarray) -> Tensor:
            return _uploaded(array.astype(np.int64), device)

        def floats(array: np.ndarray) -> Tensor:
            return _uploaded(array[in_loss_N], device)

        return cls(
            input_ids_T=ints(batch.input_ids),
            positions_T=ints(batch.positions),
            seq_lens=batch.seq_lens.tolist(),
            predictors_N=ints(in_loss_N - 1),
            targets_N=ints(batch.input_ids[in_loss_N]),
            temperatures_N=floats(batch.temperatures),
            advantages_N=floats(batch.advantages),
            inference_logprobs_N=floats(batch.inference_logprobs),
            ref_logprobs_N=None if batch.ref_logprobs is None else floats(np.nan_to_num(batch.ref_logprobs)),
            rl_weights_N=floats(batch.stream_weights("rl")),
            ce_weights_N=floats(batch.stream_weights("ce")),
            ref_kl_weights_N=floats(batch.stream_weights("ref_kl")),
            sequence_N=ints(batch.sequences[in_loss_N]),
        )

    def streams(self, logprobs_N: Tensor, entropies_N: Tensor) -> "TokenStreams":
        """What the loss sees, once the model has scored the tokens."""
        return TokenStreams(
            logprobs_N=logprobs_N,
            entropies_N=entropies_N,
            inference_logprobs_N=self.inference_logprobs_N,
            advantages_N=self.advantages_N,
            ref_logprobs_N=self.ref_logprobs_N,
            rl_weights_N=self.rl_weights_N,
            ce_weights_N=self.ce_weights_N,
            ref_kl_weights_N=self.ref_kl_weights_N,
            sequence_N=self.sequence_N,
            num_sequences=len(self.seq_lens),
        )


def _uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # Only from pinned memory does a copy run by itself. torch keeps the memory until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStreams:
    """What a loss sees of the tokens in the loss, float32 [N]. N may be 0.

    A token is in a stream where its weight is not 0, and in at least one; the weight is a factor of its loss.
    """

    logprobs_N: Tensor
    """Under the weights being trained, at the sampling temperature; carries gradients."""
    entropies_N: Tensor
    """Of the distribution each token was predicted by, in nats; carries gradients."""
    inference_logprobs_N: Tensor
    """Under the weights that sampled the token; 0 for SFT."""
    advantages_N: Tensor
    """0 for SFT."""
    ref_logprobs_N: Tensor | None
    """Under a reference policy, 0 where it was not asked; None where the micro-batch has none, and so no ref_kl."""
    rl_weights_N: Tensor
    ce_weights_N: Tensor
    ref_kl_weights_N: Tensor
    sequence_N: Tensor
    """int64: which sequence of the micro-batch each token belongs to; sequences without a token here are left out."""
    num_sequences: int
    """Sequences of the micro-batch: `sequence_N` is below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Losses by stream, each summed over the micro-batch; detached metrics [N].

    The trainer divides each sum by the tokens that its stream has in the whole batch, over all ranks, and adds them up.
    """

    sums: Mapping[Stream, Tensor]
    metrics_N: Mapping[str, Tensor]
    counted_N: Mapping[str, Tensor] = field(default_factory=dict)
    """bool: the tokens that a metric is about; a metric without an entry is about all."""


LossFunction = Callable[[TokenStreams], LossOutput]
