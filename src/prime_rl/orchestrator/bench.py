"""`orchestrator --bench`: generation is measured alone, by the loops of a real run.

Batches are made at the run's own concurrency, as if the trainer took no time, and nobody gets them: weights stay as
they are, and nothing is written but metrics, into `<output_dir>/bench` (`config.bench`). The table of them is
`monitors.tables`.
"""

from __future__ import annotations

from collections.abc import Mapping

from prime_rl.data.samples import TrainingBatch


class NoBatches:
    """Takes batches and keeps none."""

    def write(self, batch: TrainingBatch, beside: Mapping[str, bytes]) -> None:
        pass
