"""A process that stands still (SIGSTOP) is named by `rl --status`, and the run recovers once it may go on.

pytest -m slow -s tests/chaos/test_stops.py        # each kind of process for 30 s; in CI one for 5 s
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from prime_rl.journal import Entry, read_journal
from tests.chaos.cells import FLAVOURS
from tests.chaos.endstate import check
from tests.chaos.kills import KilledRun, steps_trained, tiny
from tests.chaos.phases import Phase, Victim
from tests.chaos.victims import find
from tests.integration.conftest import ROOT, _free_port, command

STEPS = 12
STEPS_WITHOUT_LAUNCHER = 150
"""Nobody waits for the launcher: the run goes on, and must not be over before it does."""
AFTER = 3
"""Steps after which the process is stopped."""
LIMIT_S = 600.0
NAMES = {
    Victim.ENV_WORKER: r"orchestrator's \S+ worker {pid}",
    Victim.TRAINER: "trainer",
    Victim.RANK_1: "trainer-1",
}


class Stop:
    """Stops one process of a run for a while, and asks `rl --status` who is the cause."""

    def __init__(self, run: KilledRun, victim: Victim, seconds: float) -> None:
        self.asked: list[str] = []
        """What the status said of the cause while it stood still."""
        self.name = ""
        """What the status should call it."""
        self.num_trained = 0
        """Steps, when it went on."""
        self._run = run
        self._victim = victim
        self._seconds = seconds

    def __call__(self, entries: Sequence[Entry]) -> None:
        if self.asked or steps_trained(entries) < AFTER:
            return
        process = find(self._run.launcher, self._victim, Phase.GENERATING)
        if process is None:
            return
        self.name = NAMES.get(self._victim, str(self._victim)).format(pid=process.pid)
        process.suspend()
        until = time.monotonic() + self._seconds
        try:
            while not self.asked or time.monotonic() < until:
                self.asked.append(cause(self._run.paths.output_dir))
                assert process.status() == psutil.STATUS_STOPPED, f"{self._victim} was ended: {process}"
        finally:
            self.num_trained = steps_trained(self._run.entries())
            process.resume()


def cause(run_dir: Path) -> str:
    """The paragraph of `rl --status` that tells who holds up the run, in one line."""
    argv = command("rl", "--status", str(run_dir))
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"^cause +(.*?)(?:\n\n|\Z)", said, re.MULTILINE | re.DOTALL)
    assert found, said
    return " ".join(found[1].split())


def stop(directory: Path, victim: Victim, *, seconds: float, flags: Sequence[str]) -> None:
    steps = STEPS_WITHOUT_LAUNCHER if victim is Victim.LAUNCHER else STEPS
    argv = tiny(directory, port=_free_port(), max_steps=steps, flags=flags)
    run = KilledRun(directory, argv, [], max_steps=steps, limit_s=LIMIT_S)
    run.on_entries = stopped = Stop(run, victim, seconds)
    ended = run.run()
    check(ended, run.paths, steps=steps)
    since = "" if victim is Victim.ENV_WORKER else r" since \d+ s"  # a worker reports nothing of its own
    last = rf"\b{stopped.name}\b(?!-)((?!which waits for).)* is stopped{since}.*SIGCONT"
    assert re.search(last, stopped.asked[-1]), stopped.asked
    assert stopped.num_trained < steps, "the run was over before the process went on"
    assert not [entry for entry in read_journal(run.paths.journal) if entry.event == "restart"]


def test_status_names_a_trainer_that_stands_still(tmp_path: Path):
    stop(tmp_path, Victim.TRAINER, seconds=5, flags=("--recovery-interval", "1"))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("victim", list(Victim))
def test_status_names_whoever_stands_still_for_half_a_minute(tmp_path: Path, victim: Victim):
    flavour = "ranks" if victim in (Victim.TRAINER, Victim.RANK_1) else "checkpoints"
    stop(tmp_path, victim, seconds=30, flags=FLAVOURS[flavour].flags)
