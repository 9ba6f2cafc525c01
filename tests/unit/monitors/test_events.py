import json

from tests.doubles.disks import small_disk

from prime_rl.monitors.events import EventLog, EventTail


def test_events_of_several_writers_are_read_once_and_in_order(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    with EventLog.opened(path) as one, EventLog.opened(path) as other:
        one.write("a server is lost")
        assert tail.read() == ["a server is lost"]
        other.write('it is "up"\nagain')
        one.write("and another")
        assert tail.read() == ['it is "up"\nagain', "and another"]
    assert tail.read() == []
    assert all(json.loads(line)["time"] > 1e9 for line in path.read_text().splitlines())


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    path.write_text('{"time": 1, "event": "a"}\n{"time": 2, "ev')
    assert tail.read() == ["a"]
    with path.open("a") as file:
        file.write('ent": "b"}\n')
    assert tail.read() == ["b"]


def test_an_event_that_a_full_disk_refuses_is_no_error(tmp_path, caplog):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        path = disk.root / "events.jsonl"
        disk.fill()
        with EventLog.opened(path) as log:
            log.write("lost")
            disk.free()
            log.write("found")
        assert EventTail(path).read() == ["found"]
    assert "events.jsonl is not written, and the run goes on: the disk is full" in caplog.text
