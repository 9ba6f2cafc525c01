"""What the processes of a run hold in memory as it goes on, and what it holds on disk."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from prime_rl.paths import RunPaths
from tests.chaos.victims import name_of

MIB: Final = 1 << 20
WARM_UP: Final = 15
"""Steps after its start in which a process still fills caches and pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one process at one step."""

    name: str
    pid: int
    step: int
    mib: float
    """Resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How memory grows with steps."""

    value: float
    """MiB in 100 steps."""
    standard_error: float
    """As if samples were independent of each other."""
    num_samples: int
    num_starts: int
    largest: float
    """MiB, of all samples."""

    def __str__(self) -> str:
        return (
            f"{self.value:+7.2f} +- {self.standard_error:.2f} MiB in 100 steps, {self.largest:.0f} MiB at most "
            f"({self.num_samples} samples of {self.num_starts} starts)"
        )


def take(launcher: psutil.Process, step: int) -> list[Sample]:
    """A sample of each process of a run."""
    samples = []
    try:
        family = [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    for process in family:
        try:
            name = "launcher" if process == launcher else name_of(process)
            if name is not None:
                rss = process.memory_info().rss
                samples.append(Sample(name=name, pid=process.pid, step=step, mib=rss / MIB))
        except (psutil.Error, OSError):
            continue
    return samples


def slopes(samples: Iterable[Sample]) -> Mapping[str, Slope]:
    """Of each kind of process: one slope, and a level for each start. What a start holds at first is left out."""
    starts: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        starts[sample.name][sample.pid].append(sample)
    found = {}
    for name, of_name in starts.items():
        warm = [[one for one in own if one.step >= own[0].step + WARM_UP] for own in of_name.values()]
        if (slope := _slope([own for own in warm if len(own) >= 2])) is not None:
            found[name] = slope
    return found


def _slope(starts: Sequence[Sequence[Sample]]) -> Slope | None:
    """None: there are too few samples."""
    pairs = []
    for own in starts:
        step, mib = (math.fsum(values) / len(own) for values in zip(*((one.step, one.mib) for one in own), strict=True))
        pairs += [(one.step - step, one.mib - mib) for one in own]
    freedom = len(pairs) - len(starts) - 1
    if freedom < 1:
        return None
    spread = math.fsum(x * x for x, _ in pairs)
    value = math.fsum(x * y for x, y in pairs) / spread
    residue = math.fsum((y - value * x) ** 2 for x, y in pairs)
    return Slope(
        value=100 * value,
        standard_error=100 * math.sqrt(residue / freedom / spread),
        num_samples=len(pairs),
        num_starts=len(starts),
        largest=max(one.mib for own in starts for one in own),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """What retention bounds."""

    weights: int
    """Directories, drafts included; so are the others."""
    checkpoints: int
    recovery: int
    batches: int
    """That could still be trained on."""
    mib: float
    """Of all these."""


def disk(paths: RunPaths) -> Disk:
    weights, checkpoints, recovery = (
        list(root.glob("*")) for root in (paths.weights, paths.checkpoints, paths.recovery)
    )
    batches = list(paths.rollouts.glob("*/batch.msgpack"))
    states = list(paths.rollouts.glob("*/state.msgpack"))
    return Disk(
        weights=len(weights),
        checkpoints=len(checkpoints),
        recovery=len(recovery),
        batches=len(batches),
        mib=sum(map(_bytes, (*weights, *checkpoints, *recovery, *batches, *states))) / MIB,
    )


def _bytes(path: Path) -> int:
    """Of a file or tree; what goes away meanwhile counts nothing."""
    try:
        return path.stat().st_size if path.is_file() else sum(map(_bytes, path.iterdir()))
    except OSError:
        return 0
