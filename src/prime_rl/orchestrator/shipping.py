"""Where batches go, and what the journal is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from prime_rl.data.samples import TrainingBatch
from prime_rl.errors import DataError
from prime_rl.journal import Entry, Journal, read_journal
from prime_rl.logs import get_logger
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.manifest import latest_step, read_manifest

COMPLETE: Final = "batch_complete"

_logger = get_logger(__name__)


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
        self._note_complete(self._writer.write(batch, beside), batch.step)

    def catch_up(self, paths: RunPaths) -> None:
        """Note that the newest batch is complete, where a process was killed before it had noted that."""
        step = latest_step(paths.rollouts)
        if step is None:
            return
        digest = self._digest(step_dir(paths.rollouts, step))
        entries = [entry for entry in _entries(paths) if (entry.event, entry.step) == (COMPLETE, step)]
        if digest not in [entry.facts.get("digest") for entry in entries]:
            self._note_complete(step_dir(paths.rollouts, step), step)

    def _note_complete(self, directory: Path, step: int) -> None:
        self._journal.note(COMPLETE, step=step, digest=self._digest(directory))

    @staticmethod
    def _digest(directory: Path) -> str:
        return read_manifest(directory).files["batch.msgpack"].xxh3


def _entries(paths: RunPaths) -> list[Entry]:
    """None of a journal that is damaged: a batch may be noted twice, and no run ends for it."""
    try:
        return read_journal(paths.journal)
    except DataError as error:
        _logger.warning("The journal is not looked at for what was noted before: %s", error)
        return []
