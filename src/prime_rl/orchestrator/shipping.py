"""Where batches go, and what the journal is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prime_rl.data.samples import TrainingBatch
from prime_rl.journal import Journal
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.manifest import read_manifest


class BatchSink(Protocol):
    """Takes batches."""

    def write(self, batch: TrainingBatch, beside: Mapping[str, bytes]) -> object:
        """Take batch N, and files that belong to it."""


class NotedBatches:
    """Publishes batches for the trainer: the journal tells of each when it is begun, and when it is complete."""

    def __init__(self, writer: BatchWriter, journal: Journal) -> None:
        self._writer = writer
        self._journal = journal

    def write(self, batch: TrainingBatch, beside: Mapping[str, bytes]) -> None:
        """Raises: ArtifactError as `BatchWriter.write`."""
        self._journal.note("batch_begun", step=batch.step)
        directory = self._writer.write(batch, beside)
        digest = read_manifest(directory).files["batch.msgpack"].xxh3
        self._journal.note("batch_complete", step=batch.step, digest=digest)
