"""Runs of the real commands in subprocesses: some to be watched and disturbed, some that several tests look at."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from prime_rl.config.load import load
from prime_rl.config.reads import VARIABLE
from prime_rl.config.trainer import SFTConfig
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.manifest import verify

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/reverse_text_cpu"
MODEL = f"{EXAMPLE}/model"
IN_SLICES = ("--model.fsdp-cpu-offload",)
"""Even one process has its model in slices then, as many ranks have."""


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "prime_rl.cli", *argv]


def run(*argv: str, timeout: float = 290) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(command(*argv), cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rewards(run_dir: Path) -> list[float]:
    return [row["reward/mean"] or 0.0 for row in read_metrics(RunPaths(run_dir).metrics("orchestrator"))]


@pytest.fixture(scope="package", autouse=True)
def reads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where every process that the tests start notes which configuration keys it reads."""
    directory = tmp_path_factory.mktemp("reads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(directory))
        yield directory


@dataclass
class Trained:
    sft_weights: Path
    run_dir: Path
    steps: int
    console: str


def train(out: Path, *rl_flags: str, seed: int = 42) -> Trained:
    """SFT and RL as in the demo."""
    run("sft", "@", f"{EXAMPLE}/sft.toml", "--output-dir", str(out / "sft"), "--seed", str(seed))
    steps = load(SFTConfig, ["@", str(ROOT / EXAMPLE / "sft.toml")], {}).max_steps
    assert steps is not None
    weights = step_dir(out / "sft" / "weights", steps)
    console = run(
        *("rl", "@", f"{EXAMPLE}/rl.toml", "--model.name", str(weights), "--output-dir", str(out / "rl")),
        *("--inference.server.port", str(_free_port()), "--seed", str(seed), *rl_flags),
    )
    return Trained(weights, out / "rl", len(rewards(out / "rl")), console)


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A shorter run than the demo's: half the steps, so that it fits into CI."""
    flags = ("--max-steps", "50", "--trainer.scheduler.decay-steps", "10")
    return train(tmp_path_factory.mktemp("demo"), *flags)


@dataclass
class Evaluated:
    table: str
    reports: dict[int, dict[str, float]]
    """By step; 0 is the model before RL."""


@pytest.fixture(scope="package")
def evaluated(trained: Trained) -> Evaluated:
    """The trained model measured before and after, with a server that `eval` starts."""
    table = run(
        *("eval", "@", f"{EXAMPLE}/eval.toml", "--model.name", str(trained.sft_weights)),
        *("--weights-dir", str(trained.run_dir / "weights"), "--steps", "50", "--num-examples", "24"),
        *("--output-dir", str(trained.run_dir), "--inference.server.port", str(_free_port())),
    )
    evals = RunPaths(trained.run_dir).evals
    files = {step: step_dir(evals, step) / "reverse-text" / "report.json" for step in (0, 50)}
    return Evaluated(table, {step: json.loads(file.read_text()) for step, file in files.items()})


@pytest.fixture(scope="package")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """`trainer` and `sft` alone on data that they make up, at the same time; their run directories."""
    flags = ("--scheduler.type", "cosine", "--scheduler.warmup-steps", "1", "--optim.lr", "1e-2", "--log.log-data")
    alone = {"trainer": ("@", "configs/debug/train.toml"), "sft": ("@", "configs/debug/sft.toml", *IN_SLICES)}
    runs = {name: RunPaths(tmp_path_factory.mktemp(name)) for name in alone}
    processes = [
        subprocess.Popen(
            command(name, *argv, *flags, "--output-dir", str(runs[name].output_dir)),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name, argv in alone.items()
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return runs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="package")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Four steps of `rl` without asynchrony, its trainer over two ranks, its teacher the policy itself; evaluated by
    itself at every second step, and on held-out examples beside training."""
    out, port = tmp_path_factory.mktemp("sharded"), str(_free_port())
    teacher = "--orchestrator.teacher-model"
    run(
        *("rl", "--model.name", MODEL, "--inference.server.port", port, "--output-dir", str(out)),
        *(f"{teacher}.model.name", MODEL, f"{teacher}.client.base-url", f"http://localhost:{port}/v1"),
        *(f"{teacher}.kl-weight", "1"),
        *("--orchestrator.eval.interval", "2", "--orchestrator.eval.cancel-inflight-rollouts-on-eval"),
        *("--orchestrator.eval.num-examples", "3", "--orchestrator.eval.rollouts-per-example", "2"),
        *("--orchestrator.eval.sampling.max-tokens", "8", "--orchestrator.val.num-examples", "4"),
        *("--max-steps", "4", "--seq-len", "128", "--orchestrator.batch-size", "8", "--max-async-level", "0"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.sampling.max-tokens", "8"),
        *("--trainer.optim.lr", "1e-2", "--trainer-gpu-ids", "0,1", "--trainer.device", "cpu"),
    )
    return RunPaths(out)


@dataclass
class Nodes:
    alone: RunPaths
    """SFT in one process."""
    together: RunPaths
    """The same on two nodes."""
    said: list[str]
    """Standard error of each node."""


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    """Three steps of SFT on two nodes, which are two agents of torchrun on loopback, and in one process."""
    out, port = tmp_path_factory.mktemp("nodes"), _free_port()
    sft = ("@", "configs/debug/sft.toml", "--max-steps", "3", "--optim.lr", "1e-3", "--device", "cpu")
    agents = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node", "1"),
            *("--node-rank", str(node), f"--rdzv-endpoint=127.0.0.1:{port}", "src/prime_rl/trainer/sft/train.py"),
            *(*sft, "--output-dir", str(out / "together")),
        ]
        for node in (0, 1)
    ]
    processes = [
        subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
        for argv in (*agents, command("sft", *sft, "--output-dir", str(out / "alone")))
    ]
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(said)
    return Nodes(RunPaths(out / "alone"), RunPaths(out / "together"), said[:2])


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
        """Every directory under a final name is complete: its marker lists what is there, digests and all.

        A batch that nothing goes on from any more has none, and its readable form alone.
        """
        for root in (self.paths.rollouts, self.paths.weights, self.paths.checkpoints, self.paths.recovery):
            for directory in root.glob("step_*"):
                if root != self.paths.rollouts or [file.name for file in directory.iterdir()] != ["rollouts.jsonl"]:
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
