import logging
import re
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from prime_rl.errors import ArtifactError
from prime_rl.trainer import writing
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.transport.checksum import entries

LIMIT_S = 20.0
TENSORS = {f"t{index}": torch.arange(10.0) + index for index in range(8)}
"""Of 40 bytes each."""


class Disk:
    """Takes tensors, but each only when `allowed`; `failing`: from that one on it refuses."""

    def __init__(self, *, failing: int | None = None) -> None:
        self.failing = failing
        self.written: dict[str, Tensor] = {}
        self.entries = {}
        self._allowed = threading.Semaphore(0)

    def allow(self, count: int = len(TENSORS)) -> None:
        self._allowed.release(count)

    def write(self, snapshot) -> None:
        for number, (name, tensor) in enumerate(snapshot):
            if self.failing == number:
                raise ArtifactError("the disk is full")
            assert self._allowed.acquire(timeout=LIMIT_S)
            self.written[name] = tensor
        self.entries = snapshot.tally.entries()


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    with closing(BackgroundWriter()) as one:
        yield one


def in_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_the_caller_goes_on_before_anything_is_written(writer):
    disk = Disk()
    writer.start("weights", TENSORS.items(), disk.write)
    assert disk.written == {}
    disk.allow()
    writer.finish()
    assert disk.written == TENSORS
    assert disk.entries == entries(TENSORS)


def test_a_lot_waits_for_the_one_before(writer):
    first, second = Disk(), Disk()
    writer.start("first", TENSORS.items(), first.write)
    asked = []

    def tensors():
        asked.append(dict(first.written))
        yield from TENSORS.items()

    thread = in_thread(lambda: writer.start("second", tensors(), second.write))
    first.allow(len(TENSORS) - 1)
    assert not asked
    first.allow(1)
    thread.join(LIMIT_S)
    assert asked == [TENSORS]
    second.allow()
    writer.finish()
    assert second.written == TENSORS


@pytest.mark.parametrize("call", ["start", "check", "finish"])
def test_an_error_is_raised_once_by_whatever_comes_next(writer, call):
    disk = Disk(failing=3)
    writer.start("weights", TENSORS.items(), disk.write)
    writer.check()
    disk.allow(3)
    writer._job.thread.join(LIMIT_S)
    with pytest.raises(ArtifactError, match="the disk is full"):
        {
            "start": lambda: writer.start("more", TENSORS.items(), disk.write),
            "check": writer.check,
            "finish": writer.finish,
        }[call]()
    writer.check()
    writer.finish()


@pytest.mark.parametrize("limit_bytes", [1, 40, 100])
def test_no_more_than_so_many_bytes_are_held_between_loop_and_disk(limit_bytes):
    disk, given, most = Disk(), [], []

    def tensors():
        for name, tensor in TENSORS.items():
            most.append(len(given) - len(disk.written))
            given.append(name)
            disk.allow(1)
            yield name, tensor

    with closing(BackgroundWriter(limit_bytes)) as writer:
        writer.start("weights", tensors(), disk.write)
        writer.finish()
    assert list(disk.written) == list(TENSORS)
    assert max(most) <= max(1, limit_bytes // 40) + 2  # one in the loop's hands, one in the writer's
    assert disk.entries == entries(TENSORS)


def test_a_disk_that_refuses_while_tensors_wait_for_room_ends_the_waiting():
    disk = Disk(failing=2)
    disk.allow(2)
    with closing(BackgroundWriter(limit_bytes=40)) as writer, pytest.raises(ArtifactError, match="the disk is full"):
        writer.start("weights", TENSORS.items(), disk.write)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_interrupted_while_it_is_copied_is_left_and_nobody_hangs(error, caplog):
    disk = Disk()
    disk.allow()
    left = []

    def tensors():
        yield "a", torch.ones(3)
        raise error

    def write(snapshot):
        try:
            disk.write(snapshot)
        except ArtifactError as told:
            left.append(str(told))
            raise

    with closing(BackgroundWriter()) as writer, pytest.raises(error):
        writer.start("weights", tensors(), write)
    assert left == ["training ended before all weights were copied"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_was_copied_whole_is_written_though_training_has_ended_by_an_error():
    disk = Disk()

    def train():
        with closing(BackgroundWriter()) as writer:
            writer.start("weights", TENSORS.items(), disk.write)
            in_thread(disk.allow)
            raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        train()
    assert disk.written == TENSORS


def test_an_error_that_comes_after_training_has_ended_by_another_is_logged(caplog):
    disk = Disk(failing=0)

    def train():
        with closing(BackgroundWriter()) as writer:
            writer.start("weights", TENSORS.items(), disk.write)
            raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        train()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["the disk is full"]


def test_a_disk_that_is_waited_for_is_told_with_size_and_seconds_and_whoever_must_know_hears_of_it(monkeypatch, caplog):
    monkeypatch.setattr(writing, "TICK_S", 0.01)
    monkeypatch.setattr(writing, "WORTH_TELLING_S", 0.02)
    caplog.set_level(logging.INFO)
    disk, calls = Disk(), []

    def hear() -> None:
        calls.append(1)
        if len(calls) == 5:
            disk.allow()

    with closing(BackgroundWriter(while_waiting=hear)) as writer:
        writer.start("weights/step_3", TENSORS.items(), disk.write)
        writer.finish()
        assert len(calls) >= 5
        assert re.fullmatch(r"Waited 0\.\d s for the disk to take weights/step_3 \(3.2e-07 GB\)", caplog.messages[-1])
        calls.clear()
        writer.start("weights/step_4", TENSORS.items(), disk.write)
        in_thread(disk.allow)
    assert not calls, "nobody listens while training ends"
    assert disk.written == TENSORS


@pytest.mark.parametrize("limit_bytes", [1, 2**20], ids=["for room", "to the end"])
def test_a_disk_that_hangs_is_not_waited_for_for_ever(monkeypatch, limit_bytes, caplog):
    monkeypatch.setattr(writing, "TICK_S", 0.01)
    monkeypatch.setattr(writing, "HANGING_S", 0.05)
    disk = Disk()
    with closing(BackgroundWriter(limit_bytes)) as writer:
        with pytest.raises(ArtifactError, match=r"weights/step_3 \(.* GB\) was not written within .* its disk hangs"):
            write_all(writer, disk)
        disk.allow()
    other = Disk()
    with closing(BackgroundWriter()) as writer:
        writer.start("weights/step_4", TENSORS.items(), other.write)
    other.allow()
    assert "weights/step_4" in caplog.messages[-1]
    assert "its disk hangs" in caplog.messages[-1]


def write_all(writer, disk):
    writer.start("weights/step_3", TENSORS.items(), disk.write)
    writer.finish()


def test_an_error_that_is_not_ours_is_logged_with_its_traceback(caplog):
    def write(snapshot) -> None:
        list(snapshot)
        raise ZeroDivisionError("lost")

    with closing(BackgroundWriter()) as writer:
        writer.start("weights", TENSORS.items(), write)
    record, told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert re.fullmatch(r"weights \(.* GB\) was not written: ZeroDivisionError: lost", told.message)


def test_whatever_the_thread_met_is_raised_with_the_name_of_the_weights(writer):
    def write(snapshot) -> None:
        list(snapshot)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    writer.start("weights/step_3", TENSORS.items(), write)
    with pytest.raises(ArtifactError, match=r"weights/step_3 .* was not written: RuntimeError: CUDA error: an illegal"):
        writer.finish()
