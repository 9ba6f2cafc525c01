"""Where the RL trainer's batches come from: the orchestrator, or a stand-in for it that needs no other process."""

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from prime_rl.config.trainer import FakeDataConfig
from prime_rl.data.packing import build_batch
from prime_rl.data.samples import NOT_SAMPLED, TrainingBatch, TrainingSample
from prime_rl.errors import ArtifactError, DataError, DeadlineExceeded
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import complete_steps, latest_step

SEEN_WITHIN_S: Final = 120.0
"""An NFS client may believe for 60 seconds that a new directory is not there (acdirmax)."""


class RolloutBatches:
    """Waits for `rollouts/step_N`, at most `timeout` seconds each."""

    def __init__(
        self, reader: BatchReader, *, timeout: float, seen_within: float = SEEN_WITHIN_S, teacher_tau: float = 0.0
    ) -> None:
        """`seen_within`: seconds after which every machine sees a batch that one of them saw.

        `teacher_tau`: of the loss; above 0, every token of the policy gradient needs a teacher's logprob.
        """
        self._reader = reader
        self._timeout = timeout
        self._seen_within = seen_within
        self._teacher_tau = teacher_tau

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Raises: DeadlineExceeded when the batch does not come."""
        self._reader.wait(step, self._timeout, idle=idle)

    def next(self, step: int) -> TrainingBatch:
        """Raises: ArtifactError when the batch is damaged, DataError when it lacks what the loss needs.

        DeadlineExceeded when this machine does not see a batch that another one saw.
        """
        try:
            batch = self._reader.read(step, self._seen_within)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"rank 0 sees batch {step} in {self._reader.directory(step)}, this machine ({socket.gethostname()}) "
                f"does not {self._seen_within:g} s later: output_dir must be on a disk that all nodes share"
            ) from error
        missing = sum(row.num_without_reference("rl") for row in batch.micro_batches)
        if self._teacher_tau > 0 and missing:
            raise DataError(
                f"batch {step} has {missing} tokens in the policy gradient without a teacher's logprob (ref_logprobs), "
                f"which loss.teacher_tau = {self._teacher_tau:g} needs; set loss.teacher_tau to 0, or have the "
                "orchestrator ask a teacher for every sample"
            )
        return batch


class ReplayedBatches:
    """The batches that a run has recorded, without an orchestrator that makes more."""

    def __init__(self, root: Path, *, seen_within: float = SEEN_WITHIN_S, teacher_tau: float = 0.0) -> None:
        """`root`: `rollouts` of that run. For the others see RolloutBatches."""
        self._root = root
        self._batches = RolloutBatches(BatchReader(root), timeout=0.0, seen_within=seen_within, teacher_tau=teacher_tau)

    def num_steps(self, max_steps: int | None) -> int:
        """Steps until the last batch that is there, or `max_steps`. Raises: ArtifactError where there is none."""
        last = latest_step(self._root)
        if last is None:
            raise ArtifactError(f"{self._root} holds no recorded batch; replay names the `rollouts` of a run")
        return last + 1 if max_steps is None else min(last + 1, max_steps)

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Waits for nobody. Raises: ArtifactError when the batch is not there."""
        steps = complete_steps(self._root)
        if step not in steps:
            raise ArtifactError(
                f"batch {step} is not among those recorded in {self._root}, of which the first is {steps[0]}: a run "
                "keeps them since its newest checkpoint, or all with keep_batches; to begin later, resume from a "
                "checkpoint (ckpt.output_dir, ckpt.resume_step)"
            )

    def next(self, step: int) -> TrainingBatch:
        """Raises: as RolloutBatches."""
        return self._batches.next(step)


class FakeBatches:
    """Batches of random tokens, to run or measure the trainer alone; batch N is a function of seed and N.

    Every token but a sample's first is in the loss, and advantages are +1 and -1 in turn, so that the whole head and
    both branches of the loss are at work. The policy that is said to have sampled is uniform over the vocabulary:
    -log(vocab_size) is about the logprob that an untrained model gives to a random token, and far more than a trained
    one does, so the importance ratio is at most vocab_size and finite whatever the model.
    """

    def __init__(self, config: FakeDataConfig, *, max_seq_len: int, vocab_size: int, seed: int) -> None:
        """`max_seq_len`: tokens of a sample where the configuration does not say."""
        self._config = config
        self._seq_len = config.seq_len or max_seq_len
        self._vocab_size = vocab_size
        self._seed = seed

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest micro-batch that may come."""
        return self._config.micro_batch_size * self._seq_len

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Nothing to wait for."""

    def next(self, step: int) -> TrainingBatch:
        rng = np.random.default_rng([self._seed, step if self._config.generate_samples else 0])
        samples = [self._sample(number, rng) for number in range(self._config.batch_size)]
        return build_batch(samples, step=step, seq_len=self.max_row_tokens)

    def _sample(self, number: int, rng: np.random.Generator) -> TrainingSample:
        length = self._seq_len
        if self._config.length == "variable":
            length = int(rng.integers(2, self._seq_len, endpoint=True))
        in_loss = np.arange(length) > 0
        return TrainingSample(
            token_ids=rng.integers(0, self._vocab_size, length, dtype=np.int32),
            loss_mask=in_loss,
            logprobs=np.where(in_loss, -math.log(self._vocab_size), 0).astype(np.float32),
            versions=np.where(in_loss, 0, NOT_SAMPLED).astype(np.int32),
            temperature=1.0,
            advantage=-1.0 if number % 2 else 1.0,
            reward=0.0,
            env_name="fake",
            rollout_id=str(number),
        )
