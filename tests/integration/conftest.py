"""A run of the real commands in subprocesses, to be watched and disturbed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.transport.manifest import verify

ROOT = Path(__file__).parents[2]
MODEL = "examples/reverse_text_cpu/model"


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "prime_rl.cli", *argv]


def await_true(what: str, condition: Callable[[], bool], timeout: float = 90.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.05)


def _hear_ctrl_c() -> None:
    """A test session in the background of a shell ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Run:
    """One `rl` command under way."""

    process: subprocess.Popen[str]
    paths: RunPaths

    def children(self) -> dict[str, psutil.Process]:
        """The processes of the run by their command (inference, orchestrator, trainer)."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "prime_rl.cli" in words:
                found[words[words.index("prime_rl.cli") + 1]] = child
        return found

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def steps(self) -> int:
        return len(read_metrics(self.paths.metrics("trainer")))

    def await_steps(self, count: int) -> None:
        def arrived() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return self.steps() >= count

        await_true(f"{count} steps", arrived)

    def assert_nothing_half_written(self) -> None:
        """Every directory under a final name is complete: its marker lists what is there, digests and all."""
        for root in (self.paths.rollouts, self.paths.weights):
            for directory in root.glob("step_*"):
                verify(directory)


@pytest.fixture
def start_rl(tmp_path: Path, free_port: int) -> Iterator[Callable[..., Run]]:
    """Start `rl` on an untrained small model; whatever is left of it is killed at the end."""
    started: list[Run] = []
    families: list[psutil.Process] = []

    def start(*argv: str, steps: int = 1000) -> Run:
        base = ["--model.name", MODEL, "--inference.server.port", str(free_port), "--output-dir", str(tmp_path / "run")]
        base += ["--max-steps", str(steps), "--seq-len", "128", "--orchestrator.batch-size", "8"]
        base += ["--orchestrator.rollouts-per-example", "4", "--orchestrator.sampling.max-tokens", "8"]
        process = subprocess.Popen(
            command("rl", *base, *argv),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_ctrl_c,
        )
        started.append(Run(process, RunPaths(tmp_path / "run")))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            families += run.family()
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(timeout=20)
        for stream in (run.process.stdout, run.process.stderr):
            assert stream is not None
            stream.close()
    assert [p for p in families if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
