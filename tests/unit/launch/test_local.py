import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from prime_rl import lifeline
from prime_rl.config.artifacts import TrainerCheckpointConfig
from prime_rl.config.inference import InferenceConfig, InferenceModelConfig, ServerConfig
from prime_rl.config.load import load
from prime_rl.config.shared import ClientConfig
from prime_rl.config.trainer import TrainerConfig, TrainerModelConfig
from prime_rl.errors import ProcessFailed
from prime_rl.launch import processes
from prime_rl.launch.local import find_server, named_machine, run_local, this_machine
from prime_rl.launch.machine import ProcessSpec
from prime_rl.monitors.events import EventTail
from prime_rl.paths import RunPaths


class Healthy(BaseHTTPRequestHandler):
    """A server that is well."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_server_that_already_runs_is_found(free_port):
    config = InferenceConfig(server=ServerConfig(port=free_port))
    assert find_server(config) is None
    with HTTPServer(("127.0.0.1", free_port), Healthy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert find_server(config) == ClientConfig(base_url=(f"http://localhost:{free_port}/v1",))


def test_a_machine_is_known_where_its_gpus_are_named():
    assert named_machine({}) is None
    machine = named_machine({"CUDA_VISIBLE_DEVICES": "2,3"})
    assert machine is not None
    assert machine.gpus == ("2", "3")


@pytest.mark.parametrize(("visible", "expected"), [("2,3", ("2", "3")), ("", ()), ("-1", ())])
def test_visible_gpus_come_from_the_environment(visible, expected):
    assert this_machine({"CUDA_VISIBLE_DEVICES": visible}).gpus == expected


def lives(name, seconds, code=0, *, command="other", pool="", is_service=False):
    """A process that is not ours and ends after a while."""
    argv = (sys.executable, "-c", f"import sys, time; time.sleep({seconds}); sys.exit({code})")
    return ProcessSpec(name=name, command=command, argv=argv, pool=pool, is_service=is_service)


@dataclass
class Failed:
    directory: Path
    config: TrainerConfig
    reason: str
    left: list[str]
    """Command lines of processes that the launcher had started and that are there when it has raised."""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A run whose trainer finds no model, beside a server that would live on."""
    directory = tmp_path_factory.mktemp("failed")
    config = TrainerConfig(model=TrainerModelConfig(name=str(directory / "nothing-here")), output_dir=directory)
    server = lives("inference", 600, command="inference", is_service=True)
    with pytest.raises(ProcessFailed) as caught:
        run_local([server, ProcessSpec(name="trainer", command="trainer", config=config)], directory)
    return Failed(directory, config, str(caught.value), left_of(directory))


def left_of(directory):
    """What runs below this process and was started for this directory, or as the server that would live on."""
    commands = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it just ended, or is a zombie
            commands.append(" ".join(child.cmdline()))
    return [words for words in commands if str(directory) in words or "time.sleep(600)" in words]


def test_a_failing_process_is_named_with_its_reason_and_its_last_lines(failed):
    assert failed.reason.startswith("trainer ended with exit code 3: ")
    assert "nothing-here" in failed.reason.splitlines()[0]
    assert str(failed.directory / "logs" / "trainer.log") in failed.reason


def test_when_one_process_fails_the_others_are_stopped(failed):
    assert failed.left == []


def test_configs_are_written_where_a_process_can_be_started_from_alone(failed):
    assert load(TrainerConfig, ["@", str(failed.directory / "configs" / "trainer.toml")], {}) == failed.config


def test_of_several_ranks_the_one_that_failed_gives_the_reason(tmp_path):
    said = "trainer (rank 1): out of luck: really"
    code = f"import sys; print('WARNING trainer | hm', {said!r}, 'no such thing', sep='\\n'); sys.exit(1)"
    spec = ProcessSpec(name="trainer", command="trainer", argv=(sys.executable, "-c", code), num_ranks=2)
    with pytest.raises(ProcessFailed) as caught:
        run_local([spec], tmp_path)
    assert str(caught.value).startswith("trainer ended with exit code 1: out of luck: really\n")


def test_a_service_that_ends_early_is_a_failure(tmp_path):
    model = InferenceModelConfig(name=str(tmp_path / "nothing-here"))
    server = ProcessSpec(name="inference", command="inference", config=InferenceConfig(model=model), is_service=True)
    with pytest.raises(ProcessFailed, match=r"^inference ended with exit code 3"):
        run_local([server, lives("trainer", 600)], tmp_path)


def test_a_process_ends_when_its_launcher_is_killed(tmp_path):
    child = (
        "import time; from prime_rl import lifeline; lifeline.watch_launcher(); print('up', flush=True); time.sleep(60)"
    )
    launcher = (
        "import os, subprocess, sys, time; from prime_rl import lifeline\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "env={**os.environ, lifeline.VARIABLE: lifeline.launcher_token()}, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its launcher"
        time.sleep(0.05)


def test_a_launcher_token_knows_a_reused_pid():
    token = lifeline.launcher_token()
    assert lifeline.is_alive(token)
    assert not lifeline.is_alive(f"{os.getpid()}:1.00")
    assert not lifeline.is_alive("999999999:1.00")


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_launcher_that_waits_to_be_reaped_is_not_alive(has_proc, monkeypatch):
    monkeypatch.setattr(lifeline, "HAS_PROC", has_proc)
    monkeypatch.setattr(lifeline, "psutil", psutil, raising=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        token = f"{process.pid}:{lifeline._started(process.pid)}"
        assert lifeline.is_alive(token)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        deadline = time.monotonic() + 10
        while lifeline.is_alive(token):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_launcher_token_survives_a_clock_that_is_set(monkeypatch):
    token = lifeline.launcher_token()
    monkeypatch.setattr(psutil, "boot_time", lambda: 1.0)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert lifeline.launcher_token() == token
    assert lifeline.is_alive(token)


def test_one_of_several_servers_may_die_and_that_is_told(tmp_path):
    specs = [
        lives(f"inference-{i}", s, 3, command="inference", pool="inference", is_service=True)
        for i, s in enumerate((0.1, 60))
    ]
    run_local([*specs, lives("trainer", 1.5)], tmp_path)
    (event,) = EventTail(tmp_path / "events.jsonl").read()
    assert event == (
        f"inference-0 ended with exit code 3; the run goes on with the others; see {tmp_path}/logs/inference-0.log"
    )


def test_the_last_server_may_not_die(tmp_path):
    specs = [
        lives(f"inference-{i}", s, 3, command="inference", pool="inference", is_service=True)
        for i, s in enumerate((0.1, 1.0))
    ]
    with pytest.raises(ProcessFailed, match=r"^inference-\d ended with exit code 3"):
        run_local([*specs, lives("trainer", 60)], tmp_path)


def test_a_service_of_another_kind_is_no_substitute(tmp_path):
    router = lives("router", 0.1, command="vllm-router", is_service=True)
    with pytest.raises(ProcessFailed, match=r"^router ended before the run was complete"):
        run_local(
            [router, lives("inference", 60, command="inference", is_service=True), lives("trainer", 60)], tmp_path
        )


def test_vllm_beside_a_torch_for_cpus_serves_no_gpu(monkeypatch):
    monkeypatch.setattr("prime_rl.launch.local.importlib.util.find_spec", lambda name: object())
    for version, expected in (("2.11.0+cpu", False), ("2.11.0", True), ("2.11.0+cu129", True)):
        monkeypatch.setattr("prime_rl.launch.local.importlib.metadata.version", lambda name, found=version: found)
        assert this_machine({"CUDA_VISIBLE_DEVICES": "0"}).has_vllm is expected


def test_a_machine_that_is_looked_at_has_a_free_port_and_one_that_is_named_none():
    port = this_machine({"CUDA_VISIBLE_DEVICES": "0"}).free_port
    assert port is not None
    with socket.create_server(("", port)):
        assert 20000 <= port < 32768
    assert named_machine({"CUDA_VISIBLE_DEVICES": "0"}).free_port is None


def test_a_teacher_does_not_stand_in_for_a_lost_server(tmp_path):
    lost = lives("inference", 0.1, 3, command="inference", pool="inference", is_service=True)
    teacher = lives("teacher", 60, command="inference", pool="teacher", is_service=True)
    with pytest.raises(ProcessFailed, match="inference ended with exit code 3"):
        run_local([lost, teacher, lives("trainer", 60)], tmp_path)


TRAINER = """
import signal, sys, time
from pathlib import Path

draft = Path(sys.argv[1], sys.argv[3], ".step_4.tmp-1")
draft.mkdir(parents=True)

def finish(number, frame):
    time.sleep(float(sys.argv[2]))
    draft.rename(draft.with_name("step_4"))
    sys.exit(0)

signal.signal(signal.SIGTERM, finish)
Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""


def writing(directory, seconds, what="weights"):
    """A trainer that is writing and needs so long for the rest; beside it a process that fails meanwhile."""
    argv = (sys.executable, "-c", TRAINER, str(directory), str(seconds), what)
    await_it = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\nsys.exit(3)"
    failing = (sys.executable, "-c", await_it, str(directory / "ready"))
    return [
        ProcessSpec(name="trainer", command="trainer", argv=argv),
        ProcessSpec(name="orchestrator", command="orchestrator", argv=failing),
    ]


@pytest.mark.parametrize("what", ["weights", "merged", "checkpoints", "recovery"])
def test_a_trainer_that_is_writing_is_waited_for_and_that_is_said(tmp_path, monkeypatch, capfd, what):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    with pytest.raises(ProcessFailed, match="orchestrator ended with exit code 3"):
        run_local(writing(tmp_path, 2, what), tmp_path)
    assert os.listdir(tmp_path / what) == ["step_4"]
    assert (
        capfd.readouterr().err
        == f"waiting for the trainer to finish what it writes to {tmp_path}/{what}; Ctrl-C ends it now\n"
    )


def test_a_checkpoint_that_is_written_elsewhere_is_waited_for_too(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    spec = writing(tmp_path, 2, "big-disk")[0]
    one = processes.start(spec, tmp_path)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    elsewhere = TrainerCheckpointConfig(output_dir=tmp_path / "big-disk")
    trainer = replace(spec, config=TrainerConfig(output_dir=tmp_path, ckpt=elsewhere))
    processes.stop([replace(one, spec=trainer)], RunPaths(tmp_path), threading.Event())
    assert os.listdir(tmp_path / "big-disk") == ["step_4"]


def test_it_is_not_waited_for_once_ctrl_c_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=press_ctrl_c_while_it_ends, args=(before,), daemon=True).start()
    start = time.monotonic()
    with pytest.raises(ProcessFailed, match="orchestrator ended with exit code 3"):
        run_local(writing(tmp_path, 60), tmp_path)
    assert time.monotonic() - start < 30
    assert os.listdir(tmp_path / "weights") == [".step_4.tmp-1"]


def press_ctrl_c_while_it_ends(before):
    while signal.getsignal(signal.SIGINT) is before:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_what_a_killed_trainer_has_left_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    (tmp_path / "weights" / ".step_9.tmp-1").mkdir(parents=True)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    server = ProcessSpec(name="inference", command="inference", argv=(sys.executable, "-c", deaf), is_service=True)
    start = time.monotonic()
    run_local([server, lives("trainer", 1.0, command="trainer")], tmp_path)
    assert time.monotonic() - start < 20
