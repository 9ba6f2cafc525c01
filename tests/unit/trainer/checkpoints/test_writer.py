import logging
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prime_rl import lifeline
from prime_rl.errors import ArtifactError
from prime_rl.paths import drafts
from prime_rl.trainer import writing
from prime_rl.trainer.chance import chance_now
from prime_rl.trainer.checkpoints import writer as module
from prime_rl.trainer.checkpoints.writer import CheckpointWriter, Contents
from prime_rl.trainer.ckpt import Record, load_state, read_record
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE, TRAINER_STATE, complete_checkpoints, verify


def state(value: float) -> dict:
    return {"model": {"a": torch.full((3, 2), value)}}


def contents(root: Path, step: int, events: list[str] | None = None, orchestrator=lambda: b"theirs") -> Contents:
    events = [] if events is None else events
    record = Record(
        step=step,
        schedule_step=step,
        total_tokens=1,
        total_samples=2,
        num_skipped=0,
        has_optimizer=False,
        chance=[chance_now(torch.device("cpu"))],
    )
    return Contents(
        final=root / f"step_{step}",
        record=record,
        orchestrator=orchestrator,
        begun=lambda: events.append(f"begun {step}"),
        complete=lambda: events.append(f"complete {step}"),
    )


def loaded(checkpoint: Path) -> torch.Tensor:
    model = SimpleNamespace(parameters={"a": torch.zeros(3, 2)})
    load_state(checkpoint / TRAINER_STATE, model, None)
    return model.parameters["a"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_holds_all_parts_and_is_told_of(tmp_path, in_background):
    events: list[str] = []
    with closing(CheckpointWriter(ALONE)) as writer:
        writer.save(state(3.0), contents(tmp_path, 4, events), in_background=in_background)
        writer.finish()
    assert events == ["begun 4", "complete 4"]
    verify(tmp_path / "step_4")
    assert (tmp_path / "step_4" / ORCHESTRATOR_STATE).read_bytes() == b"theirs"
    assert read_record(tmp_path / "step_4" / TRAINER_STATE).step == 4
    assert loaded(tmp_path / "step_4").tolist() == [[3, 3]] * 3


def test_without_an_orchestrators_state_there_is_no_file_of_it(tmp_path):
    with closing(CheckpointWriter(ALONE)) as writer:
        writer.save(state(1.0), contents(tmp_path, 1, orchestrator=lambda: None), in_background=False)
    verify(tmp_path / "step_1")
    assert not (tmp_path / "step_1" / ORCHESTRATOR_STATE).exists()


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, monkeypatch):
    may_write, order = threading.Event(), []
    save = module.save_state

    def slow(*arguments) -> None:
        assert may_write.wait(30)
        save(*arguments)

    monkeypatch.setattr(module, "save_state", slow)
    live = state(1.0)
    with closing(CheckpointWriter(ALONE)) as writer:
        writer.save(live, contents(tmp_path, 1, order), in_background=True)
        writer.wait_copied()
        live["model"]["a"].fill_(9)
        assert writer.is_busy
        assert any(unfinished() for unfinished in lifeline.unfinished)
        threading.Timer(0.05, may_write.set).start()
        writer.save(live, contents(tmp_path, 2, order), in_background=True)
        writer.finish()
    assert order == ["begun 1", "complete 1", "begun 2", "complete 2"]
    assert loaded(tmp_path / "step_1").tolist() == [[1, 1]] * 3
    assert loaded(tmp_path / "step_2").tolist() == [[9, 9]] * 3
    assert writer._is_writing not in lifeline.unfinished


def test_a_failed_write_is_raised_by_the_loop_and_leaves_the_earlier_ones(tmp_path, monkeypatch, caplog):
    writer = CheckpointWriter(ALONE)
    writer.save(state(1.0), contents(tmp_path, 1), in_background=False)

    def full(*_) -> None:
        raise ArtifactError("cannot write the trainer's state: No space left on device")

    monkeypatch.setattr(module, "save_state", full)
    writer.save(state(2.0), contents(tmp_path, 2), in_background=True)
    with pytest.raises(ArtifactError, match="No space left on device"):
        writer.finish()
    writer.finish()  # told once
    writer.save(state(3.0), contents(tmp_path, 3), in_background=True)
    with caplog.at_level(logging.ERROR, logger="prime_rl"):
        writer.close()
    assert "No space left on device" in caplog.text
    assert complete_checkpoints(tmp_path) == [1]
    assert drafts(tmp_path) == []
    verify(tmp_path / "step_1")


def test_a_disk_that_hangs_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(module, "save_state", lambda *_: may_write.wait(30))
    monkeypatch.setattr(writing, "HANGING_S", 0.01)
    monkeypatch.setattr(writing, "TICK_S", 0.01)
    with closing(CheckpointWriter(ALONE)) as writer:
        writer.save(state(1.0), contents(tmp_path, 1), in_background=True)
        with pytest.raises(ArtifactError, match=r"step_1 .* was not written within .* its disk hangs"):
            writer.finish()
        may_write.set()


def test_a_bug_in_the_thread_is_not_lost(tmp_path):
    def broken() -> bytes:
        raise KeyError("state")

    with closing(CheckpointWriter(ALONE)) as writer:
        writer.save(state(1.0), contents(tmp_path, 1, orchestrator=broken), in_background=True)
        with pytest.raises(ArtifactError, match="was not written: KeyError"):
            writer.finish()
    assert complete_checkpoints(tmp_path) == []
