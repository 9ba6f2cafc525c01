"""The training loop, one for RL and SFT, and the same on every rank.

    BatchSource --batch n--> micro-batches: forward, loss, backward -> clip -> optimizer -> Publisher --weights n+1-->
                                                                                 |
                                                                                 +-> Monitor (metrics of step n)
                                                                                 +-> Keeper (journal, checkpoints)

    consumes            waits for                                   unblocked by
    batch n (rank 0)    rollouts/step_n complete (SFT: its data)    the orchestrator's BatchWriter
    batch n (others)    the word of rank 0 that it is there         rank 0; all read it and deal it out alike
    weights n           nothing, its ranks hold them                its own step n - 1
    weights n - 1       their files, before it writes weights n     `publish.background`
    update of step n    the copy of the state, where it is saved    `checkpoints.copies`

RL and SFT differ in the batch source, the loss and the publisher that they pass in.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from prime_rl import activity
from prime_rl.data.balance import CostModel
from prime_rl.data.packing import deal
from prime_rl.data.samples import MicroBatch, TrainingBatch
from prime_rl.errors import DataError, NotFinite
from prime_rl.logs import get_logger
from prime_rl.monitors.base import Monitor
from prime_rl.trainer import diagnosis
from prime_rl.trainer.agreement import check_same_batch
from prime_rl.trainer.checkpoints.keeper import KEEPS_NOTHING, Keeper
from prime_rl.trainer.garbage import controlled_garbage
from prime_rl.trainer.memory import full_memory_in_words
from prime_rl.trainer.metrics import MetricSums
from prime_rl.trainer.model.build import TrainedModel
from prime_rl.trainer.optim.optimizer import Optimizer
from prime_rl.trainer.perf import PerfMeter
from prime_rl.trainer.profile import NO_PROFILE, StepProfile
from prime_rl.trainer.publish.publishers import Publisher
from prime_rl.trainer.ranks import ALONE, Ranks
from prime_rl.trainer.streams import BatchSource, DeviceBatch, LossFunction

STUCK_S: Final = 3600.0
"""A trainer that is at one micro-batch for longer hangs. The first of a run may compile the model."""

_BATCH: Final = "batch"
_BATCH_TO_KEEP: Final = "batch, then a recovery checkpoint"
_CATCH_UP: Final = "catch up"
"""What rank 0 tells the others: the next batch is there; weights are published once more."""

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How long to run, with whom, and what to accept."""

    max_steps: int | None
    first_step: int = 0
    is_restarted: bool = False
    """Whether another process has trained this run before: what fills the memory may be what is left of that one."""
    num_skipped: int = 0
    """In a row, before the first step, of those whose update was left out."""
    max_row_tokens: int
    """Longest micro-batch that the trainer accepts, and makes."""
    row_cost: CostModel
    """What documents are dealt to several ranks by."""
    min_step_time_s: float = 0.0
    max_skipped_steps: int = 0
    """In a row, whose update may be left out because the loss or the gradient is not finite."""
    ranks: Ranks = ALONE
    profile: StepProfile = NO_PROFILE
    keeper: Keeper = KEEPS_NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """What forward and backward over a batch leave besides `.grad`."""

    per_micro_batch: list[float]
    """Of all ranks, one after the other; already divided by the tokens which each stream has in the whole batch, so
    they add up to its loss."""
    metrics: dict[str, float]


class Trainer:
    """Turns batch n and weights n into weights n + 1, until `max_steps`."""

    def __init__(
        self,
        *,
        model: TrainedModel,
        optimizer: Optimizer,
        batches: BatchSource,
        loss: LossFunction,
        publisher: Publisher,
        monitor: Monitor,
        meter: PerfMeter,
        options: LoopOptions,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._loss = loss
        self._publisher = publisher
        self._monitor = monitor
        self._meter = meter
        self._options = options
        self._ranks = options.ranks
        self._keeper = options.keeper
        self.num_skipped = options.num_skipped
        """Steps in a row, up to now, whose update was left out. The same on all ranks, and part of a checkpoint."""
        self._keeping_s = 0.0
        """How long a checkpoint behind the last step has held up the next."""

    def run(self) -> None:
        """Train from the first step on.

        Raises: whatever ends the wait for a batch (DeadlineExceeded, ArtifactError, DataError); DataError for a batch
        that does not fit the model, or is not the same on all ranks; NotFinite for a loss or gradient that is not
        finite in too many steps; ArtifactError for weights or a checkpoint that cannot be written; MemoryFull.
        """
        first, max_steps = self._options.first_step, self._options.max_steps
        with full_memory_in_words(is_final=False):
            with controlled_garbage() as after_step:
                for step in itertools.count(first) if max_steps is None else range(first, max_steps):
                    is_final = step == first and not self._options.is_restarted
                    with self._options.profile.step(step), full_memory_in_words(is_final=is_final):
                        self._step(step)
                    after_step(step)
            self._publisher.finish()
            self._keeper.finish()

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        batch, is_recovery_due = self._next_batch(step)
        self._check_fit(batch)
        received = time.perf_counter()
        with activity.doing(f"training step {step}", deadline_s=STUCK_S):
            metrics = self._train(step, batch)
            trained = self._meter.finished()
        metrics |= self._keeper.consumed(batch)
        time.sleep(max(0.0, self._options.min_step_time_s - (trained - received)))
        before_publish = time.perf_counter()
        with activity.doing(f"publishing weights {step + 1}"):
            self._publisher.publish(step + 1)
        end = time.perf_counter()
        metrics |= self._meter.measure(batch, step_s=end - start, compute_s=trained - received)
        metrics |= {
            "time/step": end - start,
            "time/wait_for_batch": received - start,
            "time/forward_backward": trained - received,
            "time/publish": end - before_publish,
            "progress/tokens": batch.num_tokens,
            "progress/loss_tokens": batch.num_loss_tokens,
            "progress/sequences": batch.num_sequences,
        }
        if self._keeping_s:
            metrics["time/checkpoint"] = self._keeping_s
        self._log(step, metrics)
        _logger.info(format_step(step, metrics))
        # After the row: who goes on from this checkpoint has all rows before it.
        with activity.doing(f"saving the state after step {step}"):
            is_saved = self._keeper.step_done(step + 1, is_recovery_due=is_recovery_due, num_skipped=self.num_skipped)
        self._keeping_s = time.perf_counter() - end if is_saved else 0.0

    def _next_batch(self, step: int) -> tuple[TrainingBatch, bool]:
        """The batch, and whether a recovery checkpoint is to follow its step."""
        if self._ranks.is_leader:
            self._batches.wait(step, self._idle)
            word = _BATCH_TO_KEEP if self._keeper.wants_recovery() else _BATCH
            self._ranks.tell(word)
        else:
            while (word := self._ranks.hear()) not in (_BATCH, _BATCH_TO_KEEP):
                assert word == _CATCH_UP, word
                self._publisher.catch_up()
        batch = self._batches.next(step)
        check_same_batch(batch, self._ranks)
        self._keeper.received(step)
        return batch, word == _BATCH_TO_KEEP

    def _idle(self) -> None:
        if self._publisher.idle():
            self._ranks.tell(_CATCH_UP)
            self._publisher.catch_up()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._ranks.is_leader:
            self._monitor.log(metrics, step=step)

    def _check_fit(self, batch: TrainingBatch) -> None:
        vocab_size, longest = self._model.model.vocab_size, self._options.max_row_tokens
        for row in batch.micro_batches:
            if row.input_ids.max() >= vocab_size:
                raise DataError(
                    f"batch {batch.step} holds token {row.input_ids.max()}, the model has {vocab_size} tokens: its "
                    "data were made with another model's tokenizer"
                )
            if row.num_tokens > longest:
                raise DataError(
                    f"batch {batch.step} holds a micro-batch of {row.num_tokens} tokens, more than the trainer's "
                    f"model.seq_len = {longest}; set both to one value"
                )

    def _train(self, step: int, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step. The weights stay as they are when nothing is in the loss or anything is not finite."""
        if (warning := diagnosis.of_batch(batch)) is not None:
            self._warn(warning)
        if batch.num_loss_tokens == 0:
            return {"loss/mean": 0.0, "optim/grad_norm": 0.0, "optim/skipped": 0.0}
        dealt = deal(batch, self._ranks.size, self._options.max_row_tokens, self._options.row_cost)
        own = dealt.rows[self._ranks.rank]
        result = accumulate_gradients(self._model, self._loss, batch, rows=own, ranks=self._ranks)
        loss, grad_norm = math.fsum(result.per_micro_batch), self._optimizer.clip()
        metrics = {**result.metrics, **dealt.metrics, "loss/mean": loss, "optim/grad_norm": grad_norm}
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return metrics | self._skip(step, result.per_micro_batch, metrics)
        self.num_skipped = 0
        if grad_norm == 0 and warning is None:
            self._warn(diagnosis.of_zero_gradient(batch, metrics))
        if (warning := diagnosis.of_entropy(step, metrics)) is not None:
            self._warn(warning)
        self._keeper.before_update()
        return metrics | {"optim/skipped": 0.0, "optim/lr": self._optimizer.apply(step)}

    def _skip(self, step: int, losses: Sequence[float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Leave out the update of a step whose loss or gradient is not finite, and count it.

        All ranks look, each at its slices, and decide and say the same.
        Raises: NotFinite where the weights are not finite either, or it is one such step in a row too many.
        """
        parameters = self._model.parameters
        own = (
            diagnosis.first_not_finite(parameters.items()),
            diagnosis.first_not_finite((name, parameter.grad) for name, parameter in parameters.items()),
        )
        weights, gradients = zip(*self._ranks.gathered(own), strict=True)
        weight, limit = next(filter(None, weights), None), self._options.max_skipped_steps
        self.num_skipped += 1
        skipped = {"optim/skipped": float(self.num_skipped)}
        reason = diagnosis.of_not_finite(
            step,
            losses=losses,
            grad_norm=metrics["optim/grad_norm"],
            metrics=metrics,
            weight=weight,
            gradient=next(filter(None, gradients), None),
            outcome=diagnosis.of_skipping(self.num_skipped, limit, may_go_on=weight is None),
        )
        if weight is not None or self.num_skipped > limit:
            self._log(step, {**metrics, **skipped})
            raise NotFinite(reason)
        self._warn(reason)
        self._optimizer.drop_gradients()
        return skipped

    def _warn(self, text: str) -> None:
        if self._ranks.is_leader:
            _logger.warning("%s", text[:1].upper() + text[1:])


def accumulate_gradients(
    model: TrainedModel,
    loss: LossFunction,
    batch: TrainingBatch,
    *,
    rows: Sequence[MicroBatch] | None = None,
    ranks: Ranks = ALONE,
) -> BatchLoss:
    """Forward and backward over every micro-batch of the loss, each stream averaged over its tokens of the batch.

    `rows`: this rank's part of the batch, by default all of it; every rank must have as many. The gradients are added
    to the `.grad` of `model.parameters`. How the batch is split into micro-batches and ranks makes no difference.
    """
    rows = batch.micro_batches if rows is None else rows
    model.refresh(len(rows))
    counts = batch.stream_tokens
    losses: list[Tensor] = []
    metrics = MetricSums()
    for row in rows:
        activity.beat()
        tokens = DeviceBatch.from_numpy(row, model.device)
        output = loss(tokens.streams(*model.score(tokens)))
        row_loss = torch.stack([total / max(1, counts[stream]) for stream, total in output.sums.items()]).sum()
        row_loss.backward()
        model.collect()
        losses.append(row_loss.detach())
        metrics.add(output)
    of_ranks = ranks.gathered(torch.stack(losses).tolist())
    return BatchLoss(per_micro_batch=[loss for of_rank in of_ranks for loss in of_rank], metrics=metrics.summary(ranks))


_FIELDS = (
    ("time/step", "Time: {:.2f}s"),
    ("loss/mean", "Loss: {:.4f}"),
    ("entropy/mean", "Entropy: {:.4f}"),
    ("mismatch_kl/mean", "Mismatch KL: {:.4f}"),
    ("optim/grad_norm", "Grad. Norm: {:.4f}"),
    ("optim/lr", "LR: {:.2e}"),
    ("perf/throughput", "Throughput: {:.0f} tokens/s"),
    ("perf/mfu", "MFU: {:.1f}%"),
    ("perf/peak_memory_gib", "Peak Mem.: {:.1f} GiB"),
)


def format_step(step: int, metrics: Mapping[str, float]) -> str:
    """The log line of a step; a metric that the step does not have is left out."""
    fields = [template.format(metrics[name]) for name, template in _FIELDS if name in metrics]
    return " | ".join([f"Step {step}", *fields])
