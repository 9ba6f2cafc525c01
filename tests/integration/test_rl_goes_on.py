"""Whatever is killed, a supervised `rl` goes on, and the weights at its end are made of every batch once."""

import os
import signal

import psutil
import pytest

from prime_rl.journal import Entry, history, read_journal
from prime_rl.monitors.base import read_metrics
from prime_rl.monitors.events import EventTail
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import complete_steps, verify
from tests.integration.conftest import Run, await_true

STEPS = 12
OFTEN = ("--recovery-interval", "0.5")


def gone(processes: list[psutil.Process]) -> bool:
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def noted(run: Run, event: str) -> list[Entry]:
    return [entry for entry in read_journal(run.paths.journal) if entry.event == event]


def complete(run: Run, steps: int = STEPS) -> None:
    """Wait for the end of the run, and look at what there is then."""
    _, said = run.process.communicate(timeout=200)
    assert run.process.returncode == 0, said
    entries = read_journal(run.paths.journal)
    trained = history(entries)
    assert [entry.step for entry in trained] == list(range(steps))
    batches = {entry.step: entry.facts["digest"] for entry in entries if entry.event == "batch_complete"}
    assert [entry.facts["digest"] for entry in trained] == [batches[step] for step in range(steps)]
    for process in ("trainer", "orchestrator"):
        assert [row["step"] for row in read_metrics(run.paths.metrics(process))] == list(range(steps))
    verify(step_dir(run.paths.weights, steps))
    run.assert_nothing_half_written()
    assert complete_steps(run.paths.recovery) == []
    assert entries[-1].event == "run_complete"


@pytest.mark.slow  # its twin in CI: tests/chaos/test_kills.py
@pytest.mark.parametrize("victim", ["trainer", "orchestrator", "inference"])
def test_a_process_that_is_killed_is_started_again_and_no_batch_is_lost_or_repeated(start_rl, victim):
    run = start_rl(*OFTEN, steps=STEPS)
    run.await_steps(3)
    children = psutil.Process(run.children()[victim].pid).children(recursive=True)
    os.kill(run.children()[victim].pid, signal.SIGKILL)
    complete(run)
    assert [entry.facts["name"] for entry in noted(run, "restart")] == [victim]
    (event,) = [event for event in EventTail(run.paths.events).read() if "started again" in event]
    assert event.startswith(f"{victim} was killed by SIGKILL; it is started again in 1 s")
    assert gone(children)


@pytest.mark.slow  # its twin in CI: tests/chaos/test_kills.py
def test_after_the_launcher_is_killed_the_same_command_goes_on(start_rl):
    first = start_rl(*OFTEN, steps=STEPS)
    first.await_steps(3)
    family = first.family()
    first.process.kill()
    first.process.wait()
    second = start_rl(*OFTEN, steps=STEPS)
    await_true("the second launcher to begin", lambda: len(noted(second, "run_started")) == 2)
    assert gone(family)
    complete(second)
    assert [entry.facts["beginning"] for entry in noted(second, "run_started")] == ["new", "goes_on"]
    third = start_rl(*OFTEN, steps=STEPS)
    assert third.process.wait(timeout=60) == 1
    assert third.process.stderr is not None
    assert "already holds a run" in third.process.stderr.read()


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_goes_on_and_another_one_is_refused(start_rl):
    first = start_rl(*OFTEN, steps=STEPS)
    first.await_steps(2)
    beside = start_rl(*OFTEN, steps=STEPS)
    assert beside.process.wait(timeout=60) == 1
    assert beside.process.stderr is not None
    assert f"another rl (pid {first.process.pid} on " in beside.process.stderr.read()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(timeout=20) == 130
    other = start_rl("--trainer.optim.lr", "0.5", steps=STEPS)
    assert other.process.wait(timeout=60) == 1
    assert other.process.stderr is not None
    assert "trainer.optim.lr is 0.5 and was " in other.process.stderr.read()
    complete(start_rl("--recovery-interval", "60", steps=STEPS + 1), STEPS + 1)  # it may have more steps


@pytest.mark.slow
def test_a_complete_run_goes_back_to_a_checkpoint(start_rl):
    complete(start_rl("--ckpt.interval", "4", steps=STEPS))
    again = start_rl("--ckpt.interval", "4", "--ckpt.resume-step", "8", steps=STEPS)
    complete(again)
    aside = again.paths.superseded / "1"
    assert sorted(entry.name for entry in (aside / "checkpoints").iterdir()) == ["step_12"]
    assert [row["step"] for row in read_metrics(aside / "trainer" / "metrics.jsonl")] == [8, 9, 10, 11]
    assert [entry.step for entry in noted(again, "went_back")] == [8]
    (started,) = [entry for entry in noted(again, "run_started") if entry.facts["beginning"] == "goes_back"]
    assert started.step == 8


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [True, False])
def test_a_run_that_counts_its_steps_anew_reaches_its_last_one_though_a_process_is_killed_as_it_begins(
    start_rl, supervised
):
    complete(start_rl("--ckpt.interval", "4", steps=8), 8)
    how = "--supervise" if supervised else "--no-supervise"
    anew = ("--ckpt.interval", "4", "--ckpt.resume-step", "4", "--ckpt.skip-progress")
    again = start_rl(*anew, how, steps=6)
    for victim, event in (("trainer", "resumed"), ("orchestrator", "recovered")) if supervised else ():
        await_true(f"{victim} to begin", lambda event=event: noted(again, event) != [])
        os.kill(again.children()[victim].pid, signal.SIGKILL)
    complete(again, 6)
    aside = again.paths.superseded / "1"
    assert sorted(entry.name for entry in (aside / "checkpoints").iterdir()) == ["step_4", "step_8"]
    assert [row["step"] for row in read_metrics(aside / "trainer" / "metrics.jsonl")] == list(range(8))
    assert {entry.step for entry in noted(again, "resumed")} == {0}
    assert complete_steps(again.paths.checkpoints) == [4, 6]
