import logging

import pytest

from prime_rl.trainer.checkpoints.retention import CheckpointRetention, removable_checkpoints
from prime_rl.transport.batches import STATE
from prime_rl.transport.checkpoints import complete_checkpoints
from prime_rl.transport.manifest import MARKER, complete_steps, publish_dir


def publish(root, *steps):
    for step in steps:
        with publish_dir(root / f"step_{step}") as directory:
            (directory / "file").write_text(str(step))


def record(root, *steps):
    for step in steps:
        with publish_dir(root / f"step_{step}") as directory:
            for name in ("batch.msgpack", STATE, "rollouts.jsonl"):
                (directory / name).write_text(str(step))


def retention(root, **options) -> CheckpointRetention:
    defaults = {"keep_last": None, "keep_interval": None, "batches": root / "rollouts", "is_whole": True}
    return CheckpointRetention(checkpoints=root / "checkpoints", recovery=root / "recovery", **(defaults | options))


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "gone"),
    [
        (None, None, []),
        (2, None, [10, 20, 30]),
        (1, 20, [10, 30]),
        (None, 20, [10, 30]),
        (9, None, []),
    ],
)
def test_the_last_checkpoints_and_those_of_an_interval_stay(keep_last, keep_interval, gone):
    steps = [10, 20, 30, 40, 50]
    assert removable_checkpoints(steps, keep_last=keep_last, keep_interval=keep_interval) == gone


def test_only_the_newest_recovery_checkpoint_stays_until_the_run_is_complete(tmp_path):
    publish(tmp_path / "checkpoints", 4, 8)
    publish(tmp_path / "recovery", 3, 9)
    rules = retention(tmp_path, keep_last=1)
    rules.apply()
    assert complete_checkpoints(tmp_path / "checkpoints") == [8]
    assert complete_checkpoints(tmp_path / "recovery") == [9]
    assert rules.steps() == {8, 9}
    rules.finish(is_complete=False)
    assert rules.steps() == {8}, "beside which weights stay"
    assert complete_checkpoints(tmp_path / "recovery") == [9]
    rules.finish(is_complete=True)
    assert complete_checkpoints(tmp_path / "recovery") == []


def test_batches_that_no_checkpoint_needs_go_and_their_readable_rollouts_stay(tmp_path):
    record(tmp_path / "rollouts", *range(12))
    publish(tmp_path / "checkpoints", 4, 8)
    publish(tmp_path / "recovery", 10)
    retention(tmp_path).apply()
    # A damaged checkpoint 10 leaves 8 to go on from; batch 7 has the orchestrator's state there.
    assert complete_steps(tmp_path / "rollouts") == [7, 8, 9, 10, 11]
    assert [path.name for path in (tmp_path / "rollouts" / "step_6").iterdir()] == ["rollouts.jsonl"]


def test_what_a_killed_process_has_left_of_a_batch_goes_too(tmp_path):
    record(tmp_path / "rollouts", *range(6))
    publish(tmp_path / "checkpoints", 5)
    for step in (1, 5):
        (tmp_path / "rollouts" / f"step_{step}" / MARKER).unlink()
    (tmp_path / "rollouts" / "step_2" / MARKER).unlink()
    (tmp_path / "rollouts" / "step_2" / STATE).unlink()
    retention(tmp_path).apply()
    for step in (1, 2):
        assert [path.name for path in (tmp_path / "rollouts" / f"step_{step}").iterdir()] == ["rollouts.jsonl"]
    assert (tmp_path / "rollouts" / "step_5" / STATE).exists()


@pytest.mark.parametrize(("options", "left"), [({"batches": None}, 6), ({"is_whole": False}, 6), ({}, 2)])
def test_batches_stay_where_they_are_wanted_or_nobody_could_go_on_without_them(tmp_path, options, left):
    record(tmp_path / "rollouts", *range(6))
    publish(tmp_path / "checkpoints", 5)
    retention(tmp_path, **options).apply()
    assert len(complete_steps(tmp_path / "rollouts")) == left


def test_without_checkpoints_nothing_of_batches_is_removed(tmp_path):
    record(tmp_path / "rollouts", *range(3))
    retention(tmp_path).apply()
    assert complete_steps(tmp_path / "rollouts") == [0, 1, 2]


def test_the_checkpoint_that_is_being_written_counts(tmp_path):
    publish(tmp_path / "checkpoints", 4)
    rules = retention(tmp_path)
    rules.begun = 6
    assert rules.steps() == {4, 6}


def test_what_cannot_be_removed_is_a_warning(tmp_path, caplog, monkeypatch):
    publish(tmp_path / "checkpoints", 1, 2)

    def refuse(*_):
        raise OSError("read-only")

    monkeypatch.setattr("prime_rl.transport.manifest.os.rename", refuse)
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        retention(tmp_path, keep_last=1).apply()
    assert "step_1 cannot be removed" in caplog.text
