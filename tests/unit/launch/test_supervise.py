"""With real processes, which die on cue: a script counts its starts in a file and does what is said for each."""

import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from prime_rl.config.artifacts import FilesystemBroadcastConfig, NCCLBroadcastConfig, TrainerCheckpointConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import FINAL, ProcessFailed
from prime_rl.journal import Journal, read_journal
from prime_rl.launch import supervise
from prime_rl.launch.local import oversee
from prime_rl.launch.machine import ProcessSpec
from prime_rl.launch.processes import end_family, family, is_there, start, stop
from prime_rl.launch.restarts import Restarts
from prime_rl.launch.supervise import Supervision, over_files, recovering
from prime_rl.monitors.events import EventTail
from prime_rl.paths import RunPaths
from prime_rl.transport.broadcasts import fallback_reason

ACT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from prime_rl.journal import Journal

here, name, *acts = sys.argv[1:]
starts = Path(here, name + ".starts")
with starts.open("a") as file:
    print(os.getpid(), file=file, flush=True)
number = len(starts.read_text().split())
for act in acts[min(number, len(acts)) - 1].split("; "):
    exec(act)
"""
KILLED = "os.kill(os.getpid(), 9)"
LIVES = "time.sleep(600)"


def acts(directory, name, *each_start, is_service=False, pool="", port=None):
    """A process that does one of `each_start` at each of its starts; the last one at all later ones."""
    argv = (sys.executable, "-c", ACT, str(directory), name, *each_start)
    return ProcessSpec(name=name, command=name, argv=argv, is_service=is_service, pool=pool, port=port)


def starts(directory, name):
    """The pids of the starts of a process."""
    file = directory / f"{name}.starts"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a plan under supervision, with hardly any wait before a restart."""
    monkeypatch.setattr("prime_rl.launch.restarts.LONGEST_WAIT_S", 0.05)

    def supervised(*specs, limit=20, on_tick=lambda supervision: None):
        paths = RunPaths(tmp_path)
        journal = Journal(paths.journal, "launcher")
        supervision = Supervision(specs, paths, restarts=Restarts(limit), journal=journal)
        oversee(supervision, paths, lambda: on_tick(supervision))
        return supervision

    return supervised


def noted(directory, *events):
    entries = read_journal(RunPaths(directory).journal)
    return [(one.event, one.facts.get("name"), one.facts.get("number")) for one in entries if one.event in events]


@pytest.mark.parametrize("death", [KILLED, "sys.exit(1)", "os.kill(os.getpid(), 15)"])
def test_a_process_that_died_is_started_again_and_the_run_is_complete(tmp_path, run, death):
    run(acts(tmp_path, "trainer", death, "sys.exit(0)"), acts(tmp_path, "orchestrator", "sys.exit(0)"))
    assert len(starts(tmp_path, "trainer")) == 2
    assert len(starts(tmp_path, "orchestrator")) == 1
    assert noted(tmp_path, "restart") == [("restart", "trainer", 1)]
    (event,) = EventTail(tmp_path / "events.jsonl").read()
    assert event.startswith("trainer ")
    assert "it is started again in 0.05 s (restart 1)" in event


def test_the_reason_of_a_death_is_that_of_its_own_start(tmp_path, run):
    """All starts write to one log. What a process noted is no reason."""
    said = "print('trainer: out of luck\\ntrainer: note: few handles', flush=True); sys.exit(1)"
    run(acts(tmp_path, "trainer", said, KILLED, "sys.exit(0)"))
    log = tmp_path / "logs" / "trainer.log"
    assert EventTail(tmp_path / "events.jsonl").read() == [
        f"trainer ended with exit code 1: out of luck; it is started again in 0.05 s (restart 1); see {log}",
        f"trainer was killed by SIGKILL; it is started again in 0.05 s (restart 2); see {log}",
    ]


def test_every_start_and_end_is_noted(tmp_path, run):
    run(acts(tmp_path, "trainer", KILLED, "sys.exit(0)"))
    entries = read_journal(RunPaths(tmp_path).journal)
    assert [(one.event, one.facts.get("how")) for one in entries] == [
        ("process_started", None),
        ("process_ended", "trainer was killed by SIGKILL"),
        ("restart", None),
        ("process_started", None),
        ("process_ended", "done"),
    ]
    first, second = (one.facts["pid"] for one in entries if one.event == "process_started")
    assert [first, second] == starts(tmp_path, "trainer")


def test_a_service_that_ends_by_itself_is_started_again(tmp_path, run):
    server = acts(tmp_path, "inference", "sys.exit(0)", LIVES, is_service=True)
    until = f"while len(Path({str(tmp_path)!r}, 'inference.starts').read_text().split()) < 2: time.sleep(0.05)"
    run(server, acts(tmp_path, "trainer", until))
    assert len(starts(tmp_path, "inference")) == 2


def test_a_process_that_dies_three_times_in_one_place_ends_the_run_with_the_reason(tmp_path, run):
    note = f"Journal(Path({str(tmp_path / 'journal.jsonl')!r}), 'trainer').note('batch_received', step=7)"
    with pytest.raises(ProcessFailed) as caught:
        run(
            acts(tmp_path, "trainer", f"{note}; print('trainer: no luck', flush=True); {KILLED}"),
            acts(tmp_path, "o", LIVES),
        )
    assert len(starts(tmp_path, "trainer")) == 3
    first, *_ = str(caught.value).splitlines()
    assert first == (
        "trainer was killed by SIGKILL; it died 3 times in the same place, after batch received 7: no restart gets it "
        "further: no luck"
    )
    assert not psutil.pid_exists(starts(tmp_path, "o")[0])


def test_a_process_that_gets_further_each_time_is_started_until_the_limit(tmp_path, run):
    note = f"Journal(Path({str(tmp_path / 'journal.jsonl')!r}), 'trainer').note('batch_consumed', step=number)"
    with pytest.raises(ProcessFailed, match=r"started again 4 times already \(max_restarts\)"):
        run(acts(tmp_path, "trainer", f"{note}; {KILLED}"), limit=4)
    assert len(starts(tmp_path, "trainer")) == 5


def test_every_process_knows_whom_the_launcher_starts_again(tmp_path, run):
    told = 'Path(here, "told").write_text(os.environ["PRIME_RL_SUPERVISED"])'
    run(acts(tmp_path, "inference", LIVES, is_service=True), acts(tmp_path, "trainer", told))
    assert (tmp_path / "told").read_text() == "inference,trainer"


def test_what_no_restart_mends_ends_the_run_at_once(tmp_path, run):
    with pytest.raises(ProcessFailed, match=rf"^trainer ended with exit code {FINAL}: no such model\n"):
        run(acts(tmp_path, "trainer", f"print('trainer: no such model', flush=True); sys.exit({FINAL})"))
    assert len(starts(tmp_path, "trainer")) == 1


def test_a_server_that_is_given_up_ends_the_run_only_with_the_last(tmp_path, run):
    servers = [
        acts(tmp_path, f"inference-{i}", act, is_service=True, pool="inference")
        for i, act in enumerate((KILLED, LIVES))
    ]
    until = f"while not Path({str(tmp_path)!r}, 'given-up').exists(): time.sleep(0.05)"

    def on_tick(supervision):
        if any("goes on with the others" in event for event in EventTail(tmp_path / "events.jsonl").read()):
            (tmp_path / "given-up").touch()

    run(*servers, acts(tmp_path, "trainer", until), on_tick=on_tick)
    assert len(starts(tmp_path, "inference-0")) == 3
    assert len(starts(tmp_path, "inference-1")) == 1


FAMILY = (
    "child = subprocess.Popen([sys.executable, '-c', '__import__(\"time\").sleep(600)'], start_new_session=True); "
    "Path(here, 'child').write_text(str(child.pid)); os.kill(os.getpid(), 9)"
)
LOOK = (
    "import psutil; pid = int(Path(here, 'child').read_text()); "
    "gone = not psutil.pid_exists(pid) or psutil.Process(pid).status() == 'zombie'; "
    "Path(here, 'seen').write_text(str(gone))"
)


def test_nothing_of_its_family_runs_when_a_process_is_started_again(tmp_path, run):
    """A child that has a session of its own outlives its parent, and is nobody's child."""
    run(acts(tmp_path, "orchestrator", FAMILY, LOOK))
    assert (tmp_path / "seen").read_text() == "True"


def test_the_end_of_a_run_leaves_no_orphan(tmp_path, run):
    orphan = FAMILY.replace("os.kill(os.getpid(), 9)", "sys.exit(0)")
    run(acts(tmp_path, "orchestrator", orphan))
    pid = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(pid) or not is_there(psutil.Process(pid))


def test_a_server_is_started_again_only_when_its_port_is_free(tmp_path, run, free_port):
    held = socket.create_server(("", free_port))
    server = acts(tmp_path, "inference", KILLED, LIVES, is_service=True, port=free_port)
    until = f"while len(Path({str(tmp_path)!r}, 'inference.starts').read_text().split()) < 2: time.sleep(0.05)"
    ticks = 0

    def on_tick(supervision):
        nonlocal ticks
        ticks += bool(noted(tmp_path, "restart"))
        if ticks == 3:
            assert len(starts(tmp_path, "inference")) == 1
            held.close()

    run(server, acts(tmp_path, "trainer", until), on_tick=on_tick)
    assert len(starts(tmp_path, "inference")) == 2


def test_a_port_of_another_address_hinders_no_restart(tmp_path, run, free_port):
    server = acts(tmp_path, "inference", KILLED, LIVES, is_service=True, port=free_port)
    until = f"while len(Path({str(tmp_path)!r}, 'inference.starts').read_text().split()) < 2: time.sleep(0.05)"
    with socket.create_server(("127.0.0.2", free_port)):
        run(server, acts(tmp_path, "trainer", until))
    assert len(starts(tmp_path, "inference")) == 2


def test_a_pid_that_is_given_again_is_nobody_of_the_family(tmp_path):
    """A stranger with a session and a child, under the pid that a process of ours had."""
    ours = start(acts(tmp_path, "trainer", "sys.exit(0)"), tmp_path)
    ours.process.wait()
    stranger = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo started; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.defpath},
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == b"started\n"
    (child,) = psutil.Process(stranger.pid).children()
    ours.process.pid = stranger.pid
    try:
        assert family(ours) == []
        stop([ours], RunPaths(tmp_path), threading.Event())
        assert end_family(ours) == []
        assert is_there(child)
        assert stranger.poll() is None
    finally:
        child.kill()
        stranger.kill()
        stranger.communicate()


def test_a_port_that_stays_in_use_ends_the_run_in_words(tmp_path, run, free_port, monkeypatch):
    monkeypatch.setattr(supervise, "PORT_S", 0.5)
    with (
        socket.create_server(("", free_port)),
        pytest.raises(ProcessFailed, match=rf"its port {free_port} was not free within 0.5 s"),
    ):
        run(acts(tmp_path, "inference", KILLED, is_service=True, port=free_port), acts(tmp_path, "trainer", LIVES))


def test_a_process_that_hangs_is_ended_with_its_family_and_started_again(tmp_path, run):
    """Even one that is stopped, which hears no SIGTERM."""
    stopped = FAMILY.replace("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), signal.SIGSTOP)")
    told = []

    def on_tick(supervision):
        pid = supervision.pids.get("orchestrator")
        if not told and pid and psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            told.append(pid)
            supervision.hung("orchestrator", "has given no sign of life for 600 s")

    run(acts(tmp_path, "orchestrator", stopped, LOOK), on_tick=on_tick)
    assert (tmp_path / "seen").read_text() == "True"
    (event,) = EventTail(tmp_path / "events.jsonl").read()
    assert event.startswith("orchestrator has given no sign of life for 600 s and was ended; it is started again")


def test_ctrl_c_ends_what_waits_for_its_restart_too(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.launch.restarts.LONGEST_WAIT_S", 600.0)
    monkeypatch.setattr("prime_rl.launch.restarts.Restarts.after_death", lambda *a, **k: supervise.Again(600.0, 1))
    paths = RunPaths(tmp_path)
    supervision = Supervision(
        [acts(tmp_path, "trainer", KILLED), acts(tmp_path, "o", LIVES)], paths, restarts=Restarts(1)
    )

    def on_tick():
        if EventTail(paths.events).read():
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in jobs in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            oversee(supervision, paths, on_tick)
    finally:
        signal.signal(signal.SIGINT, before)
    assert supervision.pids == {}


def test_without_supervision_a_death_ends_the_run(tmp_path):
    paths = RunPaths(tmp_path)
    with pytest.raises(ProcessFailed, match="trainer was killed by SIGKILL"):
        oversee(Supervision([acts(tmp_path, "trainer", KILLED)], paths), paths, lambda: None)
    assert len(starts(tmp_path, "trainer")) == 1
    assert not paths.journal.exists()


def test_whoever_is_started_again_recovers_and_knows_what_it_was_resumed_from():
    config = TrainerConfig(
        ckpt=TrainerCheckpointConfig(resume_step=4, interval=7), weight_broadcast=NCCLBroadcastConfig()
    )
    again = over_files(recovering(config))
    assert again.recover
    assert (again.ckpt.resume_step, again.ckpt.interval) == (4, 7)
    assert again.weight_broadcast == FilesystemBroadcastConfig()
    server = InferenceConfig(weight_broadcast={"type": "nccl"})
    assert over_files(recovering(server)).weight_broadcast.type == "filesystem"


def test_weights_come_as_files_once_somebody_of_a_group_has_died(tmp_path, run):
    config = TrainerConfig(weight_broadcast=NCCLBroadcastConfig(), output_dir=tmp_path, model={"name": str(tmp_path)})
    spec = ProcessSpec(name="trainer", command="trainer", config=config)
    kill_once = iter([True])

    def on_tick(supervision):
        if "trainer" in supervision.pids and next(kill_once, False):
            os.kill(supervision.pids["trainer"], signal.SIGKILL)

    with pytest.raises(ProcessFailed, match=rf"trainer ended with exit code {FINAL}"):  # there is no model
        run(spec, on_tick=on_tick)
    assert fallback_reason(tmp_path / "broadcasts") == "trainer died"
    written = (tmp_path / "configs" / "trainer.toml").read_text()
    assert "recover = true" in written


def test_a_process_cannot_be_started_where_there_is_no_such_command(tmp_path):
    with pytest.raises(ProcessFailed, match="router cannot be started: No such file"):
        start(ProcessSpec(name="router", command="router", argv=(str(tmp_path / "router"),)), tmp_path)
