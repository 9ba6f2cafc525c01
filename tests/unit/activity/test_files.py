import os

import pytest

from prime_rl.activity.files import Doing, Report, Wait, is_of, read_reports, touch_report, touched_at, write_report

REPORT = Report(
    process="trainer",
    token="12:345",
    host="here",
    time=1.5,
    beat=2.5,
    age_s=3.5,
    doing=(Doing(text="training step 12", since=1.0, for_s=0.5, deadline_s=3600.0),),
    waits=(Wait(owner="orchestrator", reason="batch 13", since=1.0, waited_s=0.5, deadline_s=60.0),),
    loop_s=0.25,
    engine_s=0.5,
    children={"worker": "13:346"},
)


def test_a_report_is_read_as_it_was_written(tmp_path):
    write_report(tmp_path, REPORT)
    assert read_reports(tmp_path) == {"trainer": REPORT}
    assert REPORT.pid == 12
    assert [path.name for path in tmp_path.iterdir()] == ["trainer.json"]


def test_what_is_no_report_is_left_out(tmp_path):
    write_report(tmp_path, REPORT)
    (tmp_path / "half.json").write_text('{"process": "half"')
    (tmp_path / ".other.tmp.json").write_bytes((tmp_path / "trainer.json").read_bytes())
    assert list(read_reports(tmp_path)) == ["trainer"]
    assert read_reports(tmp_path / "nowhere") == {}


def test_a_touched_report_is_the_same_and_newer(tmp_path):
    write_report(tmp_path, REPORT)
    os.utime(tmp_path / "trainer.json", ns=(5, 5))
    touch_report(tmp_path, "trainer")
    assert touched_at(tmp_path, "trainer") > 5
    assert read_reports(tmp_path) == {"trainer": REPORT}
    assert touched_at(tmp_path, "nobody") == 0


@pytest.mark.parametrize(
    ("process", "owner", "answer"),
    [
        ("inference", "inference", True),
        ("inference-1", "inference", True),
        ("trainer-1", "trainer", True),
        ("trainer", "trainer-1", False),
        ("teacher", "trainer", False),
    ],
)
def test_processes_that_do_the_same_work_have_one_beginning_of_their_names(process, owner, answer):
    assert is_of(process, owner) is answer


def test_a_wait_is_overdue_at_its_deadline_and_never_without_one():
    def wait(waited_s, deadline_s):
        return Wait(owner="o", reason="r", since=0.0, waited_s=waited_s, deadline_s=deadline_s).is_overdue

    assert (wait(9.0, 10.0), wait(10.0, 10.0), wait(1e9, None)) == (False, True, False)
