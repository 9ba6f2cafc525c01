"""A trainer that learns nothing: it takes batch after batch and publishes weights that are only a number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from prime_rl.data.samples import TrainingBatch
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import PublishedWeights, draft_dir


def digest_of(step: int) -> str:
    """That of `publish_number`."""
    return f"{step:032x}"


def publish_number(weights: Path, step: int) -> None:
    """Weights of a step, complete with their marker."""
    with draft_dir(step_dir(weights, step), durable=False) as draft:
        (draft.directory / "model.safetensors").write_text(f"weights {step}")
        draft.weights = PublishedWeights(kind="model", digest=digest_of(step), tensors={})


async def train(
    output_dir: Path,
    *,
    max_steps: int,
    first: int = 0,
    step_s: float = 0.0,
    before_publishing: Callable[[int], Awaitable[object]] | None = None,
) -> list[TrainingBatch]:
    """Consume the batches of a run from `first` on, taking `step_s` for each; `before_publishing` is told each step."""
    paths = RunPaths(output_dir)
    reader = BatchReader(paths.rollouts)
    batches = []
    for step in range(first, max_steps):
        batches.append(await asyncio.to_thread(reader.read, step, 60))
        await asyncio.sleep(step_s)
        if before_publishing is not None:
            await before_publishing(step + 1)
        await asyncio.to_thread(publish_number, paths.weights, step + 1)
    return batches
