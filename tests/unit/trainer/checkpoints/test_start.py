import json
import logging

import pytest
import torch

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ArtifactError
from prime_rl.journal import Journal, history, read_journal
from prime_rl.paths import RunPaths
from prime_rl.resume import go_back
from prime_rl.trainer.chance import chance_now
from prime_rl.trainer.checkpoints.start import Start, choose_start, clear_way, earlier_checkpoints, kind_of
from prime_rl.trainer.ckpt import Record, write_record
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checkpoints import TRAINER_STATE, complete_checkpoints
from prime_rl.transport.manifest import publish_dir


def config(root, **values) -> TrainerConfig:
    return TrainerConfig.model_validate({"output_dir": str(root), **values})


def record(step: int, **values) -> Record:
    defaults = {"schedule_step": step, "total_tokens": 100 * step, "total_samples": 4 * step, "num_skipped": 1}
    chance = [chance_now(torch.device("cpu"))]
    return Record(**{"step": step, "has_optimizer": True, "chance": chance, **defaults, **values})


def publish(root, step: int, **values) -> None:
    with publish_dir(root / f"step_{step}") as directory:
        (directory / TRAINER_STATE).mkdir()
        write_record(directory / TRAINER_STATE, record(step, **values))


def damage(checkpoint) -> None:
    (checkpoint / TRAINER_STATE / "record.msgpack").write_bytes(b"?")


def start(root, **values) -> Start:
    return choose_start(config(root, **values), ALONE)


def test_a_run_begins_anew_unless_it_is_told_otherwise(tmp_path):
    publish(tmp_path / "checkpoints", 4)
    assert kind_of(config(tmp_path)) == "anew"
    assert start(tmp_path, ckpt={}) == Start(kind="anew")
    assert "resume_step = -1" in (earlier_checkpoints(config(tmp_path)) or "")
    assert earlier_checkpoints(config(tmp_path / "other")) is None


def test_resume_takes_the_step_that_was_asked_for_with_its_counts(tmp_path):
    for step in (4, 8):
        publish(tmp_path / "checkpoints", step)
    publish(tmp_path / "recovery", 9)
    assert start(tmp_path, ckpt={"resume_step": 4}).first_step == 4
    latest = start(tmp_path, ckpt={"resume_step": -1})
    assert latest.checkpoint == tmp_path / "recovery" / "step_9"
    progress = latest.progress()
    assert (progress.tokens, progress.samples, progress.schedule_ahead, progress.num_skipped) == (900, 36, 0, 1)
    with pytest.raises(ArtifactError, match=r"no complete checkpoint of step 5 .* complete are: 4, 8, 9"):
        start(tmp_path, ckpt={"resume_step": 5})


def test_checkpoints_may_lie_elsewhere(tmp_path):
    publish(tmp_path / "elsewhere", 3)
    found = start(tmp_path / "run", ckpt={"resume_step": -1, "output_dir": str(tmp_path / "elsewhere")})
    assert found.checkpoint == tmp_path / "elsewhere" / "step_3"


@pytest.mark.parametrize(
    ("skip", "first_step", "schedule_ahead", "tokens"),
    [
        ({}, 8, 2, 800),
        ({"skip_scheduler": True}, 8, -8, 800),
        ({"skip_progress": True}, 0, 10, 0),
        ({"skip_progress": True, "skip_scheduler": True}, 0, 0, 0),
    ],
)
def test_skipping_counts_steps_or_the_schedule_anew(tmp_path, skip, first_step, schedule_ahead, tokens):
    publish(tmp_path / "checkpoints", 8, schedule_step=10)
    found = start(tmp_path, ckpt={"resume_step": -1, **skip})
    assert found.first_step == first_step
    assert found.skips_anything == bool(skip)
    progress = found.progress()
    assert (progress.schedule_ahead, progress.tokens) == (schedule_ahead, tokens)


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path):
    publish(tmp_path / "checkpoints", 4, has_optimizer=False)
    with pytest.raises(ArtifactError, match=r"step_4 holds weights alone .* model.name = .*weights/step_4"):
        start(tmp_path, ckpt={"resume_step": 4})
    assert start(tmp_path, recover=True, ckpt={"weights_only": True}).checkpoint is None


def test_recovering_takes_the_newest_sound_one_or_the_beginning_and_skips_nothing(tmp_path, caplog):
    assert start(tmp_path, recover=True) == Start(kind="recover")
    publish(tmp_path / "checkpoints", 4)
    publish(tmp_path / "recovery", 6)
    found = start(tmp_path, recover=True)
    assert (found.checkpoint, found.first_step) == (tmp_path / "recovery" / "step_6", 6)
    damage(tmp_path / "recovery" / "step_6")
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        assert start(tmp_path, recover=True).first_step == 4
    assert "step_6 is passed over" in caplog.text


def test_recovering_begins_as_resumed_until_there_is_something_newer(tmp_path):
    for step in (2, 4):
        publish(tmp_path / "checkpoints", step, schedule_step=step + 3)
    resumed = {"ckpt": {"resume_step": 4, "skip_optimizer": True, "skip_scheduler": True}}
    found = start(tmp_path, recover=True, **resumed)
    assert (found.kind, found.first_step, found.skips_anything) == ("recover", 4, True)
    assert found.progress().schedule_ahead == start(tmp_path, **resumed).progress().schedule_ahead == -4
    publish(tmp_path / "recovery", 4, schedule_step=0)  # after what is skipped
    assert start(tmp_path, recover=True, **resumed).progress().schedule_ahead == -4
    publish(tmp_path / "recovery", 6)
    found = start(tmp_path, recover=True, **resumed)
    assert (found.first_step, found.skips_anything) == (6, False)


@pytest.mark.parametrize("step", [4, -1])
def test_recovering_after_counting_anew_begins_so_again_until_there_is_a_checkpoint_of_that_count(tmp_path, step):
    publish(tmp_path / "checkpoints", 4, schedule_step=6)
    resumed = {"ckpt": {"resume_step": step, "skip_progress": True}}
    first = start(tmp_path, **resumed)
    go_back(RunPaths(tmp_path), 4, counts_anew=True)
    source = tmp_path / "superseded" / "1" / "checkpoints" / "step_4"
    for values, kind in ((resumed, "resume"), (resumed | {"recover": True}, "recover")):
        found = start(tmp_path, **values)
        assert (found.kind, found.checkpoint, found.first_step) == (kind, source, 0)
        assert found.progress() == first.progress()
    for root, number in (("recovery", 0), ("checkpoints", 4)):
        publish(tmp_path / root, number, schedule_step=number + 6)
        found = start(tmp_path, recover=True, **resumed)
        assert (found.checkpoint, found.first_step) == (tmp_path / root / f"step_{number}", number)
        assert (found.progress().schedule_ahead, found.skips_anything) == (6, False)


def test_recovering_goes_no_further_back_than_the_checkpoint_of_the_resume(tmp_path):
    for step in (2, 4):
        publish(tmp_path / "checkpoints", step)
    found = start(tmp_path, recover=True, ckpt={"resume_step": 4, "weights_only": True})
    assert found.checkpoint == tmp_path / "checkpoints" / "step_4"
    damage(tmp_path / "checkpoints" / "step_4")
    with pytest.raises(ArtifactError, match="the checkpoint of step 4 cannot be used"):
        start(tmp_path, recover=True, ckpt={"resume_step": 4})


def rows(root) -> list[int]:
    return [json.loads(line)["step"] for line in RunPaths(root).metrics("trainer").read_text().splitlines()]


def with_rows(root, count: int) -> None:
    path = RunPaths(root).metrics("trainer")
    path.parent.mkdir(parents=True)
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(count)))


def clear(root, found: Start, **values) -> None:
    journal = Journal(RunPaths(root).journal, "trainer")
    clear_way(config(root, **values), found, journal, recorded=root / "rollouts")


def test_resuming_sets_aside_what_lies_beyond_and_notes_it(tmp_path):
    with_rows(tmp_path, 8)
    for step in (4, 8):
        publish(tmp_path / "checkpoints", step)
        publish(tmp_path / "weights", step)
    journal = Journal(RunPaths(tmp_path).journal, "trainer")
    for step in range(8):
        journal.note("batch_consumed", step=step)
    clear(tmp_path, start(tmp_path, ckpt={"resume_step": 4}), ckpt={"resume_step": 4})
    assert complete_checkpoints(tmp_path / "checkpoints") == complete_checkpoints(tmp_path / "weights") == [4]
    assert (tmp_path / "superseded" / "1" / "weights" / "step_8").is_dir()
    assert rows(tmp_path) == [0, 1, 2, 3]
    entries = read_journal(RunPaths(tmp_path).journal)
    assert [(entry.event, entry.step) for entry in entries[-2:]] == [("went_back", 4), ("resumed", 4)]
    assert [entry.step for entry in history(entries)] == [0, 1, 2, 3]


def test_recovering_keeps_weights_and_batches_and_makes_room_for_what_was_damaged(tmp_path):
    with_rows(tmp_path, 7)
    publish(tmp_path / "checkpoints", 4)
    publish(tmp_path / "checkpoints", 6)
    publish(tmp_path / "weights", 7)
    damage(tmp_path / "checkpoints" / "step_6")
    clear(tmp_path, start(tmp_path, recover=True), recover=True)
    assert complete_checkpoints(tmp_path / "weights") == [7]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_6.damaged-1"]
    assert rows(tmp_path) == [0, 1, 2, 3]


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_of_damaged_checkpoints_the_last_stays(tmp_path):
    publish(tmp_path / "checkpoints", 4)
    for _ in range(2):
        publish(tmp_path / "checkpoints", 6)
        damage(tmp_path / "checkpoints" / "step_6")
        clear(tmp_path, start(tmp_path, recover=True), recover=True)
        assert names(tmp_path / "checkpoints") == ["step_4", "step_6.damaged-1"]
    publish(tmp_path / "checkpoints", 8)
    damage(tmp_path / "checkpoints" / "step_8")
    clear(tmp_path, start(tmp_path, recover=True), recover=True)
    assert names(tmp_path / "checkpoints") == ["step_4", "step_8.damaged-1"]


def test_weights_alone_that_are_written_again_are_not_called_damaged(tmp_path):
    publish(tmp_path / "recovery", 4)
    for step in (3, 6):
        publish(tmp_path / "checkpoints", step, has_optimizer=False)
    values = {"recover": True, "ckpt": {"weights_only": True}}
    clear(tmp_path, start(tmp_path, **values), **values)
    assert names(tmp_path / "checkpoints") == ["step_3"]


def test_batches_that_are_gone_cannot_be_trained_on_again(tmp_path):
    publish(tmp_path / "checkpoints", 2)
    publish(tmp_path / "rollouts", 5)
    with pytest.raises(ArtifactError, match=r"checkpoint that is whole is that of step 2, .* the oldest in .* is 5"):
        clear(tmp_path, start(tmp_path, recover=True), recover=True)
