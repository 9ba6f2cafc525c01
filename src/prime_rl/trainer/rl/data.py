"""Batches of the orchestrator as the Trainer's source."""

from prime_rl.data.samples import TrainingBatch
from prime_rl.transport.batches import BatchReader


class RolloutBatches:
    """Waits for `rollouts/step_N`, at most `timeout` seconds each."""

    def __init__(self, reader: BatchReader, *, timeout: float) -> None:
        self._reader = reader
        self._timeout = timeout

    def next(self, step: int) -> TrainingBatch:
        """Raises: DeadlineExceeded when the batch does not come; ArtifactError when it is damaged."""
        return self._reader.wait(step, self._timeout)
