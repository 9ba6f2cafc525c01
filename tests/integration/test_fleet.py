"""`rl` with two servers on the CPU, one of which is killed and one of which hangs, under load."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.monitors.events import EventTail
from prime_rl.paths import step_dir
from tests.integration.conftest import MODEL, ROOT, Run, await_true, command


@pytest.fixture
def two_ports() -> tuple[int, int]:
    """Two free ports, one after the other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port, port + 1


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers that a test starts itself."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def servers(run: Run) -> list[psutil.Process]:
    """The server processes of a run, in the order of their ports."""
    found = [child for child in psutil.Process(run.process.pid).children() if "inference" in child.cmdline()]
    return sorted(found, key=lambda child: child.cmdline()[-1])


def serve(port: int, out: Path) -> subprocess.Popen[bytes]:
    """A server started by hand."""
    words = ["inference", "--model.name", MODEL, "--server.port", str(port), "--device", "cpu"]
    words += ["--model.max-model-len", "128", "--output-dir", str(out)]
    with (out.parent / f"{out.name}.out").open("ab") as log:
        return subprocess.Popen(
            command(*words), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )


def served(port: int) -> dict:
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False).json()


def answers(port: int) -> bool:
    try:
        return "version" in served(port)
    except httpx.TransportError:
        return False


def generated(port: int) -> float:
    """Tokens that a server has generated since it was started."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False).text
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return float(line.rpartition(" ")[2])


def rollouts(run: Run) -> list[dict]:
    steps = sorted(run.paths.rollouts.glob("step_*"), key=lambda path: int(path.name[5:]))
    return [
        json.loads(line) | {"step": int(path.name[5:])}
        for path in steps
        for line in (path / "rollouts.jsonl").read_text().splitlines()
    ]


def test_a_server_that_is_killed_and_one_that_hangs_lose_no_rollout(start_rl, two_ports, started, tmp_path):
    port, other_port = two_ports
    run = start_rl(
        *("--inference.server.port", str(port), "--inference.parallel.dp", "2", "--inference.backend", "embedded"),
        *("--orchestrator.max-off-policy-steps", "8", "--seq-len", "256", "--orchestrator.sampling.max-tokens", "128"),
        *("--orchestrator.sampling.extra-body", '{"ignore_eos": true}'),  # servers have more to do than the trainer
        "--no-supervise",  # the test starts the server again
    )
    events = EventTail(run.paths.events)
    told: list[str] = []

    def tells(*words: str) -> bool:
        assert run.process.poll() is None, run.process.communicate()
        told.extend(events.read())
        return any(all(word in event for word in words) for event in told)

    run.await_steps(2)
    first, second = servers(run)
    assert min(generated(port), generated(other_port)) > 0, "both serve"

    second.send_signal(signal.SIGKILL)
    await_true("the loss to be told", lambda: tells(f":{other_port}/v1 is lost", "1 of 2 are up"), timeout=10)
    died = "inference-1 was killed by SIGKILL; the run goes on with the others"
    await_true("the launcher to tell it", lambda: tells(died), timeout=5)
    run.await_steps(run.steps() + 2)
    started.append(serve(other_port, tmp_path / "again"))
    await_true("the server to be there again", lambda: answers(other_port))
    await_true("its return", lambda: tells(f":{other_port}/v1 is up", "2 of 2 are up"), timeout=10)
    assert served(other_port)["version"] >= 3, "it got the current weights"
    tokens = generated(other_port)
    await_true("its first rollouts", lambda: generated(other_port) > tokens, timeout=10)

    told.clear()
    first.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        await_true("the hang to be told", lambda: tells(f":{port}/v1 is lost", "no answer within"), timeout=25)
        assert time.monotonic() - stopped_at < 20
        run.await_steps(run.steps() + 2)
    finally:
        first.send_signal(signal.SIGCONT)
    await_true("its return", lambda: tells(f":{port}/v1 is up", "2 of 2 are up"), timeout=20)

    found = rollouts(run)
    assert {sum(row["step"] == step for row in found) for step in range(max(row["step"] for row in found))} == {8}
    rows = read_metrics(run.paths.metrics("orchestrator"))
    kinds = {name for row in rows for name, count in row.items() if name.startswith("errors/") and count}
    assert kinds <= {"errors/rate", "errors/empty_completion"}, "an untrained model says nothing now and then"
    assert {row["inference/servers_up"] for row in rows} == {1, 2}
    assert rows[-1]["inference/failovers"] >= 1
    assert all(row["off_policy_gap/max"] <= 9 for row in rows)
    assert all(row["versions"][0] >= row["step"] - 9 for row in found)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(20) == 130
    assert run.process.stdout is not None
    assert f":{other_port}/v1 is lost" in run.process.stdout.read(), "the console shows it"


@pytest.mark.slow
def test_a_server_that_lives_on_begins_every_run_with_the_model_that_it_was_started_with(
    start_rl, free_port, started, tmp_path
):
    started.append(serve(free_port, tmp_path / "server"))
    rewards = []
    for number in range(2):
        run = start_rl(
            *("--no-inference", "--orchestrator.client.base-url", f"http://127.0.0.1:{free_port}/v1"),
            *(
                "--output-dir",
                str(tmp_path / f"run{number}"),
                "--max-async-level",
                "0",
                "--orchestrator.sampling.seed",
                "7",
            ),
            steps=3,
        )
        assert run.process.wait(150) == 0, run.process.communicate()
        run.paths = type(run.paths)(tmp_path / f"run{number}")
        found = rollouts(run)
        assert [row["versions"] for row in found] == [[row["step"]] * 2 for row in found]
        rewards.append(sorted(json.dumps(row["messages"]) for row in found if row["step"] == 0))
        assert served(free_port)["version"] == 2, "the orchestrator is done before the last weights are there"
        assert step_dir(run.paths.weights, 3).is_dir()
    assert rewards[0] == rewards[1], "the same model says the same to the same questions"
