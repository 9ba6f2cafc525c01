"""Whatever is killed, `rl` without supervision ends soon and says why; no process and no half-written file is left."""

import os
import signal
import time

import psutil
import pytest

from tests.integration.conftest import await_true


def gone(processes: list[psutil.Process]) -> bool:
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("inference", signal.SIGKILL),
        ("orchestrator", signal.SIGTERM),
        ("trainer", signal.SIGKILL),
        pytest.param("inference", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("orchestrator", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("trainer", signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_when_a_process_is_killed_the_run_ends_and_names_it(start_rl, victim, number):
    run = start_rl("--no-supervise")
    run.await_steps(2)
    family = run.family()
    killed_at = time.monotonic()
    os.kill(run.children()[victim].pid, number)
    code = run.process.wait(timeout=10)
    took = time.monotonic() - killed_at
    assert code == 1
    assert run.process.stderr is not None
    message = run.process.stderr.read()
    assert f"rl: {victim} " in message
    assert took < 10
    assert gone(family)
    run.assert_nothing_half_written()


def test_when_the_launcher_is_killed_nothing_is_left_running(start_rl):
    run = start_rl()
    run.await_steps(1)
    family = run.family()
    assert len(family) >= 4  # three processes and an environment worker
    run.process.kill()
    run.process.wait()
    await_true("the processes to end", lambda: gone(family), timeout=10)
    run.assert_nothing_half_written()


def test_ctrl_c_ends_everything_and_says_where_the_results_are(start_rl):
    run = start_rl()
    run.await_steps(1)
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=10) == 130
    assert run.process.stdout is not None
    assert "stopped after" in run.process.stdout.read()
    assert gone(family)
