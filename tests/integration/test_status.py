"""`rl --status` beside a run whose processes are stopped in turn: it names the right one, and the run goes on."""

import os
import signal
import subprocess

import psutil
import pytest

from prime_rl.activity.files import read_reports
from prime_rl.journal import read_journal
from tests.integration.conftest import ROOT, await_true, command

STEPS = 12


def status(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "400"}  # sentences are not broken
    return subprocess.run(
        command("rl", "--status", *words), cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120
    )


def cause(run) -> str:
    shown = status(str(run.paths.output_dir))
    assert shown.returncode == 0, shown.stderr
    return next((line for line in shown.stdout.splitlines() if line.startswith("cause ")), "")


def await_event(run, process, event, step):
    def came():
        assert run.process.poll() is None, run.process.communicate()
        return any((one.process, one.event, one.step) == (process, event, step) for one in read_journal(journal))

    journal = run.paths.journal
    await_true(f"{process} to note {event} {step}", came, timeout=240)


def pid_of(run, name):
    if name == "launcher":
        return run.process.pid
    if name != "worker":
        return run.children()[name].pid
    orchestrator = psutil.Process(run.children()["orchestrator"].pid)
    return next(one.pid for one in orchestrator.children() if "prime_rl.environments.worker" in one.cmdline())


def cause_with(run, words):
    """The sentence that names the cause, once it has these words."""
    said = ""

    def has_words():
        nonlocal said
        said = cause(run)
        return all(word in said for word in words)

    await_true(f"{words} in the cause", has_words, timeout=240)
    return said


@pytest.mark.slow  # its twin in CI: tests/chaos/test_stops.py
@pytest.mark.timeout(900)
def test_whoever_is_stopped_is_named_as_the_cause_and_the_run_completes_when_all_go_on(start_rl):
    run = start_rl(steps=STEPS)
    for step, (name, words) in enumerate(
        {
            "orchestrator": ("orchestrator", "which is stopped since"),
            "trainer": ("trainer is stopped since",),
            "inference": ("waits for inference (", "which is stopped since"),
            "worker": ("orchestrator", "reverse-text worker", "is stopped"),
            "launcher": ("nobody waits for it yet, but launcher is stopped",),
        }.items()
    ):
        await_event(run, "orchestrator", "batch_complete", 1 + 2 * step)
        pid = pid_of(run, name)
        os.kill(pid, signal.SIGSTOP)
        try:
            said = cause_with(run, words)
        finally:
            os.kill(pid, signal.SIGCONT)
        others = {"orchestrator", "trainer", "inference", "launcher"} - {name}
        assert not [other for other in others if f"{other} is stopped" in said], said
    assert run.process.wait(timeout=240) == 0
    shown = status(str(run.paths.output_dir)).stdout
    assert "complete" in shown.splitlines()[0]
    assert f"trainer {STEPS} of {STEPS}" in shown.splitlines()[1]
    assert "cause" not in shown
    assert not [one for one in read_journal(run.paths.journal) if one.event == "restart"]
    assert {report.ended for report in read_reports(run.paths.activity).values()} == {True}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_hangs_is_told_of_and_started_again(start_rl):
    run = start_rl("--hang-timeout", "30", steps=6)
    await_event(run, "orchestrator", "batch_complete", 1)
    pid = pid_of(run, "trainer")
    os.kill(pid, signal.SIGSTOP)
    await_true("it to be ended", lambda: not psutil.pid_exists(pid), timeout=240)
    assert run.process.wait(timeout=240) == 0
    (restart,) = [one for one in read_journal(run.paths.journal) if one.event == "restart"]
    assert restart.facts["name"] == "trainer"
    assert "has given no sign of life for 3" in str(restart.facts["reason"])
    assert "has given no sign of life" in run.paths.events.read_text()
    assert "trainer has given no sign of life" in status(str(run.paths.output_dir)).stdout


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_without_a_run_is_an_error_in_words(tmp_path, exists):
    directory = tmp_path if exists else tmp_path / "nowhere"
    shown = status(str(directory))
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"rl: there is no run in {directory}: it ")
    assert "Traceback" not in shown.stderr
