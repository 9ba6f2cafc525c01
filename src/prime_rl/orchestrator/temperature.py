"""The sampling temperature of each batch. Pure."""

from __future__ import annotations

import math

from prime_rl.config.sampling import TrainSamplingConfig


def temperature_at(sampling: TrainSamplingConfig, step: int, max_steps: int | None) -> float:
    """The temperature of batch `step` (0-indexed).

    With a schedule over n steps and p = step / (n - 1), at most 1: start + (end - start) f, where f = p (linear) or
    (1 - cos(pi p)) / 2 (cosine). One step has the first temperature.

    Example: linear from 1.2 to 0.8 over 5 steps -> 1.2, 1.1, 1.0, 0.9, 0.8, and 0.8 from then on.
    """
    schedule = sampling.temp_scheduler
    if schedule is None:
        return sampling.temperature
    num_steps = schedule.total_steps or max_steps
    assert num_steps is not None, "validated"
    part = min(step / max(num_steps - 1, 1), 1.0)
    factor = part if schedule.type == "linear" else (1 - math.cos(math.pi * part)) / 2
    return schedule.start_temperature + (schedule.end_temperature - schedule.start_temperature) * factor
