"""Five hundred steps with a kill every fifty: memory stays flat, and the disk within what retention keeps.

pytest -m slow -s tests/chaos/test_soak.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from prime_rl.journal import Entry
from tests.chaos.endstate import check
from tests.chaos.kills import KilledRun, steps_trained, tiny
from tests.chaos.memory import Disk, Sample, Slope, disk, slopes, take
from tests.chaos.phases import Phase, Victim
from tests.integration.conftest import _free_port

STEPS = 500
KILL_EVERY = 50
SAMPLE_EVERY = 3
LIMIT_S = 3600.0
"""Alone on two cores it takes a fifth of that."""
KEEP_LAST = 2
LEVEL = 1
FLAGS = (
    *("--ckpt.interval", "10", "--ckpt.keep-last", str(KEEP_LAST), "--max-async-level", str(LEVEL)),
    *("--recovery-interval", "5", "--max-restarts", "100"),
    *("--inference.kv-cache-memory-gb", "0.01"),  # its pages count when they are first touched: soon all of them
)
MOST_GROWTH = 2.0
"""MiB in 100 steps, beyond two standard errors. A batch that is kept would be 0.03 MiB, a model of this size 2 MiB."""
SEED = 7


class Watch:
    """Samples what a run holds, and kills one of its processes every KILL_EVERY steps."""

    def __init__(self, run: KilledRun) -> None:
        kinds = [victim for victim in Victim if victim is not Victim.RANK_1]
        draw = random.Random(SEED)
        self.plan = [victim for _ in range(2) for victim in draw.sample(kinds, len(kinds))][: STEPS // KILL_EVERY - 1]
        """Who is killed, one after the other; with the launcher all of the run."""
        self.samples: list[Sample] = []
        self.disks: dict[int, Disk] = {}
        self._run = run
        self._killed = 0
        self._sampled = -1

    def __call__(self, entries: Sequence[Entry]) -> None:
        step = steps_trained(entries)
        if step >= self._sampled + SAMPLE_EVERY:
            self._sampled = step
            self.samples += take(self._run.launcher, step)
            self.disks[step] = disk(self._run.paths)
        is_due = self._killed < len(self.plan) and step >= KILL_EVERY * (self._killed + 1)
        if is_due and self._run.kill_now(self.plan[self._killed], Phase.GENERATING):
            self._killed += 1


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_memory_is_flat_and_disk_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = tiny(tmp_path, port=_free_port(), max_steps=STEPS, flags=FLAGS)
    run = KilledRun(tmp_path, argv, [], max_steps=STEPS, limit_s=LIMIT_S)
    run.on_entries = watch = Watch(run)
    ended = run.run()
    found = slopes(watch.samples)
    with capsys.disabled():
        print("", report(found, watch.disks, ended.seconds), sep="\n")
    check(ended, run.paths, steps=STEPS)
    assert [shot.victim for shot in ended.shots] == watch.plan
    assert {"launcher", "inference", "orchestrator", "env worker", "trainer"} <= found.keys()
    growing = {
        name: str(slope) for name, slope in found.items() if slope.value - 2 * slope.standard_error > MOST_GROWTH
    }
    assert not growing
    check_disk(watch.disks)


def check_disk(disks: dict[int, Disk]) -> None:
    """Beside what is kept there may be a draft, and what is just being removed."""
    kept = KEEP_LAST * (LEVEL + 1) + LEVEL + 1
    for step, used in disks.items():
        assert used.weights <= kept + 4, (step, used)
        assert used.checkpoints <= KEEP_LAST + 2, (step, used)
        assert used.recovery <= 3, (step, used)
    early, late = (
        [used.mib for step, used in disks.items() if (step < STEPS // 2) == is_early] for is_early in (True, False)
    )
    assert max(late) <= 1.2 * max(early), (max(early), max(late))


def report(found: dict[str, Slope], disks: dict[int, Disk], seconds: float) -> str:
    lines = [
        f"{STEPS} steps, a kill every {KILL_EVERY}: {seconds:.0f} s",
        *(f"{name:14} {slope}" for name, slope in found.items()),
    ]
    for step in sorted(disks)[:: max(1, len(disks) // 10)]:
        lines.append(f"step {step:4}: {disks[step]}")
    return "\n".join(lines)
