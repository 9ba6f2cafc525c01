"""Hangs that are seen in the reports of real processes."""

import os
import signal

import pytest
from tests.doubles.reporting import await_true, process, tell, until_report

from prime_rl import activity
from prime_rl.activity.causes import Hang
from prime_rl.launch import hangs
from prime_rl.launch.hangs import Hangs


@pytest.fixture
def launcher(tmp_path):
    """A process that reports as the launcher does."""
    with process(tmp_path, "hear()", **{activity.NAME: "launcher"}) as child:
        until_report(tmp_path, lambda one: True, name="launcher")
        yield child


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(hangs, "INTERVAL_S", 0.0)


def until_hang(watch, running) -> Hang:
    def look() -> list[Hang]:
        found: list[Hang] = watch.overdue(running)
        return found

    (hang,) = await_true("a hang", look)
    return hang


def test_a_stopped_process_hangs_after_the_limit_and_not_before(tmp_path, launcher):
    with process(tmp_path, "hear()") as child:
        until_report(tmp_path, lambda one: True)
        running, watch = {"trainer": child.pid}, Hangs(tmp_path, 4.0)
        patient = Hangs(tmp_path, 600.0)
        assert watch.overdue(running) == patient.overdue(running) == []
        os.kill(child.pid, signal.SIGSTOP)
        hang = until_hang(watch, running)
        assert (hang.culprit, hang.reason.rpartition(" for ")[0]) == ("trainer", "has given no sign of life")
        assert watch.overdue(running) == patient.overdue(running) == []
        os.kill(child.pid, signal.SIGCONT)


def test_a_process_that_is_at_the_same_for_too_long_hangs_though_it_reports(tmp_path, launcher):
    code = """
        with activity.doing("training step 12", deadline_s=4.0):
            hear()
            activity.beat()
            hear()
    """
    with process(tmp_path, code) as child:
        running, watch = {"trainer": child.pid}, Hangs(tmp_path, 600.0)
        assert "training step 12" in until_hang(watch, running).reason
        tell(child)
        until_report(tmp_path, lambda one: one.doing[0].for_s < 4.0)


def test_a_server_that_gets_on_is_not_ended_with_the_others_that_somebody_waits_for(tmp_path, launcher):
    waits = """
        with activity.waiting("inference", "rollouts", deadline_s=1.0):
            hear()
    """
    works = """
        with activity.doing("serving weights 7"):
            while True:
                activity.beat()
                time.sleep(0.1)
    """
    idles = """
        with activity.doing("serving weights 7"):
            hear()
    """
    with (
        process(tmp_path, works, **{activity.NAME: "inference-0"}) as busy,
        process(tmp_path, idles, **{activity.NAME: "inference-1"}) as idle,
    ):
        for name in ("inference-0", "inference-1"):
            until_report(tmp_path, lambda one: one.age_s > 1.0, name=name)
        assert until_report(tmp_path, lambda one: True, name="inference-1").got_on_s is None
        with process(tmp_path, waits) as waiter:
            watch = Hangs(tmp_path, 600.0)
            hang = until_hang(watch, {"trainer": waiter.pid, "inference-0": busy.pid, "inference-1": idle.pid})
            assert hang.culprit == "inference-1"


def test_whom_another_process_has_waited_for_too_long_is_named(tmp_path, launcher):
    waits = """
        with activity.waiting("orchestrator", "batch 8", deadline_s=1.0):
            hear()
    """
    with (
        process(tmp_path, "hear()", **{activity.NAME: "orchestrator"}) as culprit,
        process(tmp_path, waits) as waiter,
    ):
        until_report(tmp_path, lambda one: one.age_s > 1.0, name="orchestrator")
        watch = Hangs(tmp_path, 600.0)
        hang = until_hang(watch, {"trainer": waiter.pid, "orchestrator": culprit.pid})
        assert hang.culprit == "orchestrator"
        assert hang.reason.startswith("has kept trainer waiting ")
        assert hang.reason.endswith(" s for batch 8")
