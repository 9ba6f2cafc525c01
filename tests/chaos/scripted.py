"""A launcher for the tests of the harness: real processes and a real journal, and no training.

    python tests/chaos/scripted.py DIRECTORY STEPS [--stubborn]

It starts one process, called trainer, and trains a step in 20 ms. That process is started again when it dies; a batch
that it had received is then received again. Weights are begun and published in one write. `--stubborn`: the process
outlives a launcher that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from prime_rl import activity, lifeline
from prime_rl.journal import Journal, read_journal
from prime_rl.paths import RunPaths

STEP_S = 0.02
WATCHED = "from prime_rl import lifeline; lifeline.watch_launcher(); import time; time.sleep(60)"
STUBBORN = "import time; time.sleep(60)"


def main(directory: Path, steps: int, *, child: str) -> None:
    paths = RunPaths(directory)
    before = read_journal(paths.journal)
    launcher, trainer = Journal(paths.journal, "launcher"), Journal(paths.journal, "trainer")
    launcher.note("run_started", attempt=1 + sum(entry.event == "run_started" for entry in before), pid=os.getpid())
    process = start(child, launcher)
    step = sum(entry.event == "batch_consumed" for entry in before)
    trainer.note("went_back", step=step)
    while step < steps:
        trainer.note("batch_received", step=step)
        time.sleep(STEP_S)
        if process.poll() is not None:
            launcher.note("process_ended", name="trainer", how="killed")
            process = start(child, launcher)
            continue
        trainer.note("batch_consumed", step=step, digest=f"batch {step}")
        at_once(paths.journal, "weights_begun", "weights_published", step=step + 1)
        step += 1
    process.kill()
    process.wait()
    launcher.note("run_complete")


def start(child: str, launcher: Journal) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", child, "prime_rl.cli", "trainer"],
        env=os.environ | {lifeline.VARIABLE: lifeline.launcher_token(), activity.NAME: "trainer"},
        start_new_session=True,
    )
    launcher.note("process_started", name="trainer", pid=process.pid)
    return process


def at_once(journal: Path, *events: str, step: int) -> None:
    lines = [
        {"time": time.time(), "process": "trainer", "event": event, "step": step, "digest": "w"} for event in events
    ]
    with journal.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), child=STUBBORN if "--stubborn" in sys.argv else WATCHED)
