"""The reporter, in processes of its own: they are stopped and killed here."""

import os
import resource
import signal
import time

import pytest
from tests.doubles.reporting import await_true, process, read, tell, until_report

from prime_rl import activity
from prime_rl.activity.files import touched_at
from prime_rl.activity.states import Condition, state_of


def test_what_a_process_is_at_and_waits_for_is_in_its_report_at_once(tmp_path):
    code = """
        hear()
        with activity.doing("training step 12", deadline_s=9.0):
            with activity.waiting("orchestrator", "batch 13", deadline_s=7.0):
                hear()
            hear()
        hear()
    """
    with process(tmp_path, code) as child:
        assert [task.text for task in until_report(tmp_path, lambda one: True).doing] == ["starting"]
        tell(child)
        report = until_report(tmp_path, lambda one: one.waits)
        (task,), (wait,) = report.doing, report.waits
        assert (task.text, task.deadline_s) == ("training step 12", 9.0)
        assert (wait.owner, wait.reason, wait.deadline_s) == ("orchestrator", "batch 13", 7.0)
        assert abs(wait.since - time.time()) < 30
        assert report.pid == child.pid
        until_report(tmp_path, lambda one: one.waits and one.waits[0].waited_s > wait.waited_s)  # no change, but a beat
        tell(child)
        assert until_report(tmp_path, lambda one: not one.waits).doing[0].text == "training step 12"
        tell(child)
        assert until_report(tmp_path, lambda one: not one.doing)
        tell(child)
        assert child.wait(timeout=60) == 0
    report = read(tmp_path)
    assert report is not None
    assert report.ended
    assert state_of(report, tmp_path).condition is Condition.ENDED


def test_words_may_be_made_when_they_are_written_and_those_of_before_stay_where_they_cannot(tmp_path):
    code = """
        number = [0]
        def words():
            number[0] += 1
            return f"batch {number[0]}" if number[0] < 3 else 1 / 0
        with activity.doing(words):
            hear()
    """
    with process(tmp_path, code):
        until_report(tmp_path, lambda one: one.doing[0].text == "batch 2")
        seen = until_report(tmp_path, lambda one: one.doing[0].for_s > 3.0)
        assert seen.doing[0].text == "batch 2"


def test_a_process_that_is_stopped_is_seen_to_be_and_loses_no_time_of_its_deadlines(tmp_path):
    code = """
        with activity.waiting("orchestrator", "batch 13", deadline_s=1000.0) as waiting:
            say("waits")
            before, began = waiting.seconds, time.monotonic()
            hear()
            say(f"{waiting.seconds - before} {time.monotonic() - began} {activity.lost_s()}")
            hear()
    """
    with process(tmp_path, code) as child:
        assert child.stdout.readline() == "waits\n"
        report = until_report(tmp_path, lambda one: one.waits)
        assert state_of(report, tmp_path).condition is Condition.ALIVE
        os.kill(child.pid, signal.SIGSTOP)
        await_true("it to stop", lambda: state_of(report, tmp_path).condition is Condition.STOPPED)
        state = await_true("time to pass", lambda: (s := state_of(read(tmp_path), tmp_path)).since_s > 6 and s)
        assert state.trouble == f"is stopped since {state.since_s:.0f} s"
        tell(child)
        os.kill(child.pid, signal.SIGCONT)
        waited_s, passed_s, lost_s = map(float, child.stdout.readline().split())
        assert passed_s > 6
        assert lost_s > 3
        assert waited_s == pytest.approx(passed_s - lost_s, abs=0.5)
        until_report(tmp_path, lambda one: one.waits and one.waits[0].waited_s < passed_s - 3)
        assert state_of(until_report(tmp_path, lambda one: True), tmp_path).condition is Condition.ALIVE


def test_a_disk_that_is_full_costs_nothing_but_the_words(tmp_path):
    """A limit on the size of files stands in for it: writing fails, and a sign of life is given all the same."""
    code = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with activity.doing("training step 12"):
            hear()
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    with process(tmp_path, code) as child:
        until_report(tmp_path, lambda one: True)
        tell(child)
        seen = [touched_at(tmp_path, "trainer")]

        def is_touched_again():
            seen.append(touched_at(tmp_path, "trainer"))
            return len(set(seen)) > 3

        await_true("signs of life", is_touched_again)
        assert read(tmp_path).doing[0].text == "starting"
        tell(child)
        assert child.wait(timeout=60) == 0


def test_a_run_directory_that_was_deleted_is_not_made_anew(tmp_path):
    with process(tmp_path / "activity", "hear()") as child:
        until_report(tmp_path / "activity", lambda one: True)
        (tmp_path / "activity").rename(tmp_path / "elsewhere")
        before = read(tmp_path / "elsewhere")
        time.sleep(2.5)  # more than two beats
        assert not (tmp_path / "activity").exists()
        assert child.poll() is None
        assert before is not None


def test_the_launchers_name_and_the_rank_make_the_name_of_the_report(tmp_path):
    (tmp_path / "named").mkdir()  # the first rank's
    code = """
        activity.start(Path(os.environ["DIRECTORY"]), "inference", rank=1)
        say(activity.own_name())
        hear()
    """
    env = {"DIRECTORY": str(tmp_path / "named"), activity.NAME: "inference-3"}
    with process(tmp_path, code, **env) as child:
        assert child.stdout.readline() == "inference-3\n"
        assert until_report(tmp_path / "named", lambda one: True, name="inference-3-1")


def test_a_process_waits_twice_as_long_for_whom_the_launcher_starts_again_and_for_nobody_else(monkeypatch):
    owners = ["trainer", "inference", "inference-1", "teacher", activity.DISK]

    def patience():
        waits = [activity.waiting(owner, "x", deadline_s=5.0) for owner in owners]
        return [wait.patience_s for wait in waits]

    monkeypatch.delenv(activity.SUPERVISED, raising=False)
    assert patience() == [5.0] * 5
    assert activity.patience_s(3.0, "trainer") == 3.0
    monkeypatch.setenv(activity.SUPERVISED, "inference-0,inference-1,orchestrator,trainer")
    assert patience() == [10.0, 10.0, 10.0, 5.0, 5.0]
    assert activity.patience_s(3.0, "trainer") == 6.0
    assert [activity.is_supervised(owner) for owner in owners] == [True, True, True, False, False]
    assert activity.waiting("trainer", "x", deadline_s=None).is_overdue is False


def test_a_beat_begins_the_deadline_of_what_a_process_is_at_anew_and_renewing_that_of_a_wait():
    with activity.doing("x", deadline_s=1.0) as task, activity.waiting("y", "z", deadline_s=1.0) as waiting:
        await_true("time", lambda: task.seconds > 0.1)
        activity.beat()
        assert task.seconds < 0.1
        assert waiting.seconds > 0.1
        waiting.renew(0.0)
        assert waiting.seconds > 0.1
        waiting.renew()
        assert waiting.seconds < 0.1


def test_a_change_costs_microseconds():
    def change():
        with activity.doing("training step 12", deadline_s=60.0):
            pass

    for _ in range(1000):
        change()
    best_s = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            change()
        best_s = min(best_s, (time.perf_counter() - start) / 100)
    assert best_s < 100e-6  # some 5; a busy machine is given twenty times that
