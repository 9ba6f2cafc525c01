import os
import signal
import time
from pathlib import Path

import msgspec
from tests.doubles.reporting import await_true, process, tell, until_report

from prime_rl import lifeline
from prime_rl.activity.files import Report, read_reports
from prime_rl.activity.states import Condition, State, all_states, state_of


def test_a_killed_process_is_gone_and_another_one_of_its_pid_is_not_taken_for_it(tmp_path):
    with process(tmp_path, "hear()") as child:
        report = until_report(tmp_path, lambda one: True)
        child.kill()
        child.wait()
    assert state_of(report, tmp_path).condition is Condition.GONE
    own = Report(process="x", token=f"{os.getpid()}:1", host=report.host, time=0.0, beat=0.0, age_s=0.0)
    assert state_of(own, tmp_path).condition is Condition.GONE


def test_a_process_that_runs_and_does_not_report_is_silent_and_so_is_one_whose_loop_stands_still(tmp_path):
    with process(tmp_path, "hear()"):
        report = until_report(tmp_path, lambda one: True)
        old = msgspec.structs.replace(report, beat=report.beat - 60, time=report.time - 60)
        assert state_of(old, tmp_path / "nowhere").condition is Condition.SILENT
        assert state_of(old, tmp_path).condition is Condition.ALIVE, "its file was touched"
        stuck = msgspec.structs.replace(report, loop_s=60.0)
        assert state_of(stuck, tmp_path).trouble == "is silent since 60 s"


def test_a_server_whose_engine_takes_no_step_is_stuck_and_not_silent():
    report = Report(process="x", token="1:1", host="far", time=time.time(), beat=0.0, age_s=0.0, engine_s=60.0)
    state = state_of(report, Path("nowhere"))
    assert (state.condition, state.trouble) == (Condition.STUCK, "has an engine that takes no step since 60 s")


def test_a_process_of_another_machine_is_judged_by_its_reports_alone(tmp_path):
    report = Report(process="x", token="1:1", host="far", time=time.time(), beat=0.0, age_s=0.0)
    assert state_of(report, tmp_path).condition is Condition.ALIVE
    old = msgspec.structs.replace(report, time=report.time - 30)
    assert state_of(old, tmp_path).trouble == "is silent since 30 s"


def test_what_the_launcher_has_started_and_does_not_report_yet_is_starting(tmp_path):
    with process(tmp_path, "hear()") as child:
        report = until_report(tmp_path, lambda one: True)
        launcher = msgspec.structs.replace(
            report, process="launcher", token=lifeline.launcher_token(), children={"inference": report.token}
        )
        states = all_states({"launcher": launcher}, tmp_path)
        assert states["inference"] == State(condition=Condition.STARTING, pid=child.pid)
        gone = msgspec.structs.replace(report, process="inference", token="1:1")
        states = all_states({"launcher": launcher, "inference": gone}, tmp_path)
        assert states["inference"].condition is Condition.STARTING, "what it said before its restart does not count"


def test_children_that_are_stopped_are_seen_by_name_and_without_one(tmp_path):
    code = """
        import subprocess
        children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
        activity.child_started("worker 0", children[0].pid)
        say(" ".join(str(child.pid) for child in children))
        hear()
        for child in children:
            child.kill()
        activity.child_ended("worker 0")
        hear()
    """
    with process(tmp_path, code) as child:
        named, other = map(int, child.stdout.readline().split())
        until_report(tmp_path, lambda one: one.children)
        assert list(all_states(read_reports(tmp_path), tmp_path)) == ["trainer"]
        for pid in (named, other):
            os.kill(pid, signal.SIGSTOP)
        names = {"trainer", "trainer's worker 0", f"trainer's child {other}"}
        await_true("both", lambda: set(all_states(read_reports(tmp_path), tmp_path)) == names)
        tell(child)
        assert until_report(tmp_path, lambda one: not one.children)
