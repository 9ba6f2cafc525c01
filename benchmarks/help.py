"""How long each command takes to show its help: median, least and most of 15 runs.

    python benchmarks/help.py

Wall time of the installed command, and the time that it computed: the latter hardly depends on what else the machine
does.
"""

import resource
import statistics
import subprocess
import sysconfig
import time
from pathlib import Path

COMMANDS = ("rl", "trainer", "sft", "orchestrator", "inference", "eval")
RUNS = 15


def measure(command: str) -> tuple[float, float]:
    """Seconds of wall and computing time that `command --help` takes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([Path(sysconfig.get_path("scripts")) / command, "--help"], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shown(seconds: tuple[float, ...]) -> str:
    """Median, least and most."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def main() -> None:
    """Print a line for each command."""
    print(f"seconds of --help: median (least to most) of {RUNS} runs")
    for command in COMMANDS:
        walls, computed = zip(*(measure(command) for _ in range(RUNS)), strict=True)
        print(f"{command:13} wall {shown(walls)}   computed {shown(computed)}")


if __name__ == "__main__":
    main()
