"""A trainer that learns nothing: it takes batch after batch and publishes weights that are only a number."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prime_rl.data.samples import TrainingBatch
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import publish_dir


def publish_number(weights: Path, step: int) -> None:
    """Weights of a step, complete with their marker."""
    with publish_dir(step_dir(weights, step)) as directory:
        (directory / "model.safetensors").write_text(f"weights {step}")


async def train(output_dir: Path, *, max_steps: int, step_s: float = 0.0) -> list[TrainingBatch]:
    """Consume the batches of a run, taking `step_s` for each."""
    paths = RunPaths(output_dir)
    reader = BatchReader(paths.rollouts)
    batches = []
    for step in range(max_steps):
        batches.append(await asyncio.to_thread(reader.wait, step, 60))
        await asyncio.sleep(step_s)
        await asyncio.to_thread(publish_number, paths.weights, step + 1)
    return batches
