"""Where a step's time and memory go: traces for chrome://tracing or Perfetto, and snapshots of GPU memory.

<trace_path>/step_N_rank_R.json.gz                 what CPU and GPU did in step N (torch.profiler)
<memory_profiler_path>/step_N_rank_R.pickle        who holds the memory after it, and how it came to be there
                                                   (drop it on https://docs.pytorch.org/memory_viz)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger

_logger = get_logger(__name__)

MAX_STEPS: Final = 10
"""Steps that are recorded, the first ones of a run: each leaves a file of many megabytes."""
_MAX_EVENTS: Final = 200_000
"""Allocations and frees that a snapshot tells of, the latest ones."""


class StepProfile:
    """Records the first steps of this rank, if it is to record anything."""

    def __init__(self, *, memory_dir: Path | None, trace_dir: Path | None, device: torch.device, rank: int) -> None:
        """Raises: ArtifactError where a directory cannot be made."""
        if memory_dir is not None and device.type != "cuda":
            _logger.warning("memory_profiler_path has no effect here: torch records the memory of NVIDIA GPUs only")
            memory_dir = None
        for directory in (memory_dir, trace_dir):
            if directory is not None:
                _make(directory)
        self._memory_dir = memory_dir
        self._trace_dir = trace_dir
        self._device = device
        self._rank = rank
        self._num_recorded = 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what happens inside as step `step`; files are written at its end. Nothing after `MAX_STEPS` steps."""
        if self._num_recorded == MAX_STEPS or (self._memory_dir is None and self._trace_dir is None):
            yield
            return
        if self._memory_dir is not None and self._num_recorded == 0:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
        self._num_recorded += 1
        name = f"step_{step}_rank_{self._rank}"
        if self._trace_dir is None:
            yield
        else:
            with self._traced() as trace:
                yield
            trace.export_chrome_trace(str(self._trace_dir / f"{name}.json.gz"))
        if self._memory_dir is not None:
            torch.cuda.memory._dump_snapshot(str(self._memory_dir / f"{name}.pickle"))
            if self._num_recorded == MAX_STEPS:
                torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _traced(self) -> Iterator[profile]:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, acc_events=True) as trace:  # what torch 2.11 warns of without
            yield trace
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what the step has begun belongs to it


NO_PROFILE: Final = StepProfile(memory_dir=None, trace_dir=None, device=torch.device("cpu"), rank=0)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{directory} cannot be made for profiles: {error.strerror}; name another path") from None
