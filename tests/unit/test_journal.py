import multiprocessing
import os
import resource

import pytest

from prime_rl.errors import DataError
from prime_rl.journal import Journal, history, read_journal


def test_what_is_noted_is_read_in_order(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    Journal(path, "trainer").note("batch_consumed", step=3, digest="9f", seconds=1.5)
    Journal(path, "launcher").note("run_complete")
    first, second = read_journal(path)
    assert (first.process, first.event, first.step) == ("trainer", "batch_consumed", 3)
    assert first.facts == {"digest": "9f", "seconds": 1.5}
    assert (second.process, second.event, second.step, second.facts) == ("launcher", "run_complete", None, {})
    assert first.time <= second.time


def test_where_there_is_no_journal_there_are_no_entries(tmp_path):
    assert read_journal(tmp_path / "journal.jsonl") == []


def test_a_line_that_was_torn_is_left_out_and_harms_no_other(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "trainer")
    journal.note("batch_consumed", step=0)
    whole = path.read_bytes()
    for end in range(1, len(whole)):
        path.write_bytes(whole + whole[:end])
        assert [entry.step for entry in read_journal(path)] == ([0, 0] if end == len(whole) else [0])
        journal.note("batch_consumed", step=1)
        journal.note("batch_consumed", step=2)
        assert [entry.step for entry in read_journal(path)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["no json", "[1]", '{"time": 1, "process": "trainer"}', '{"time": 1'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "trainer")
    journal.note("batch_consumed", step=0)
    with path.open("a") as file:
        file.write(f"{line}\n")
    journal.note("batch_consumed", step=1)
    with pytest.raises(DataError, match=r"line 2 of .*journal\.jsonl is damaged"):
        read_journal(path)


def _note_many(path, process):
    journal = Journal(path, process)
    for step in range(200):
        journal.note("batch_consumed", step=step, padding="x" * 300)


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "journal.jsonl"
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    writers = [context.Process(target=_note_many, args=(path, name)) for name in ("trainer", "orchestrator")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = read_journal(path)
    for name in ("trainer", "orchestrator"):
        assert [entry.step for entry in entries if entry.process == name] == list(range(200))


def test_where_nothing_can_be_written_a_run_goes_on_with_one_warning_and_one_when_it_can_again(tmp_path, caplog):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "journal.jsonl", "trainer")
    for step in range(3):
        journal.note("batch_consumed", step=step)
    assert caplog.text.count("cannot be noted") == 1
    assert "batch_consumed cannot be noted: " in caplog.text
    (tmp_path / "file").unlink()
    for step in (3, 4):
        journal.note("batch_consumed", step=step)
    assert caplog.text.count("events are noted again; 3 are missing") == 1
    assert [entry.step for entry in read_journal(tmp_path / "file" / "journal.jsonl")] == [3, 4]
    (tmp_path / "file" / "journal.jsonl").unlink()
    (tmp_path / "file").rmdir()
    (tmp_path / "file").touch()
    journal.note("batch_consumed", step=5)
    assert caplog.text.count("cannot be noted") == 2


def test_on_a_full_disk_a_run_goes_on_and_the_next_line_is_whole(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "trainer")
    journal.note("batch_consumed", step=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, limits[1]))  # a write ends after 10 bytes
    try:
        journal.note("batch_consumed", step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "batch_consumed cannot be noted: the disk is full" in caplog.text
    journal.note("batch_consumed", step=2)
    assert [entry.step for entry in read_journal(path)] == [0, 2]


def test_the_history_of_the_weights_is_without_what_training_went_back_behind(tmp_path):
    path = tmp_path / "journal.jsonl"
    trainer, orchestrator = Journal(path, "trainer"), Journal(path, "orchestrator")
    trainer.note("went_back", step=0)
    for step in range(4):
        orchestrator.note("batch_complete", step=step, digest="a")
        trainer.note("batch_consumed", step=step, digest="a")
    trainer.note("went_back", step=2)
    for step in range(2, 5):
        trainer.note("batch_consumed", step=step, digest="b")
    found = history(read_journal(path))
    assert [(entry.step, entry.facts["digest"]) for entry in found] == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "b"),
    ]  # fmt: skip
    trainer.note("went_back", step=0)
    assert history(read_journal(path)) == []
