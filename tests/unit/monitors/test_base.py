import json

from tests.doubles.disks import small_disk

from prime_rl.monitors.base import FakeMonitor, FanOut, JsonlMonitor, MetricsTail, read_metrics


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "trainer" / "metrics.jsonl"
    for step in range(2):
        monitor = JsonlMonitor(path)
        monitor.log({"reward/mean": 0.25 * step}, step=step)
        monitor.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(path)] == [(0, 0.0), (1, 0.25)]


def test_nan_and_infinity_are_null_in_the_file(tmp_path):
    monitor = JsonlMonitor(tmp_path / "m.jsonl")
    monitor.log({"a": float("nan"), "b": float("inf"), "c": 1}, step=0)
    monitor.close()
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n{"st')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0}]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_rows_that_a_full_disk_refuses_are_left_out_and_the_others_stay_whole(tmp_path, caplog):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        path = disk.root / "trainer" / "metrics.jsonl"
        monitor = JsonlMonitor(path)
        monitor.log({"a": 0.5}, step=0)
        disk.fill()
        for step in (1, 2):
            monitor.log(
                {f"metric/{number}": 0.1 for number in range(300)}, step=step
            )  # more than the page has room for
        disk.free()
        monitor.log({"a": 1.5}, step=3)
        monitor.close()
        assert [row["step"] for row in read_metrics(path)] == [0, 3]
    assert "metrics.jsonl is not written, and the run goes on: the disk is full" in caplog.text
    assert "2 lines are not in" in caplog.text


def test_every_monitor_gets_every_row():
    first, second = FakeMonitor(), FakeMonitor()
    both = FanOut([first, second])
    both.log({"a": 1.0}, step=3)
    both.close()
    assert first.rows == second.rows == [(3, {"a": 1.0})]
    assert first.closed
    assert second.closed


def test_a_file_that_was_exchanged_for_a_shorter_one_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [f'{{"step": {step}}}\n' for step in range(4)]
    path.write_text("".join(rows))
    tail = MetricsTail(path)
    assert [row["step"] for row in tail.read()] == [0, 1, 2, 3]
    exchanged = tmp_path / "exchanged"
    exchanged.write_text("".join(rows[:2]))
    exchanged.replace(path)
    with path.open("a") as file:
        file.writelines(rows[2:])
    assert [row["step"] for row in tail.read()] == [0, 1, 2, 3]
    path.write_text(rows[0])
    assert [row["step"] for row in tail.read()] == [0]


def test_a_row_that_is_damaged_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nhm\n\xff\n7\n{"step": 1}\n', encoding="latin-1")
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]
