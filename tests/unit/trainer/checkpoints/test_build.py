"""Whole runs of the trainer, as far as checkpoints show in them."""

import logging
import shutil
from contextlib import contextmanager

import pytest
import torch

from prime_rl import activity
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import PrimeRLError
from prime_rl.journal import history, read_journal
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer import build
from prime_rl.trainer.checkpoints import writer
from prime_rl.trainer.checkpoints.keeper import CheckpointKeeper
from prime_rl.trainer.ckpt import read_record
from prime_rl.trainer.publish.publishers import WeightPublisher
from prime_rl.trainer.rl.build import train_rl
from prime_rl.transport import checkpoints
from prime_rl.transport.batches import STATE, BatchReader, BatchWriter
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE, complete_checkpoints, verify
from prime_rl.transport.manifest import complete_steps, publish_dir
from prime_rl.transport.weights import load_weights


class Killed(BaseException):
    """Nothing of a run handles it."""


@contextmanager
def killed_in(step: int):
    """The run ends right before this step, without finishing anything but the files that are being written."""
    whole = build.Trainer._step

    def stepping(trainer, number: int) -> None:
        if number == step:
            trainer._keeper._writer.finish()
            trainer._publisher.finish()
            raise Killed
        whole(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.Trainer, "_step", stepping)
        with pytest.raises(Killed):
            yield


@pytest.fixture
def config(tmp_path, model_dir):
    def make(name: str = "run", **values) -> TrainerConfig:
        return TrainerConfig.model_validate(
            {
                "model": {"name": str(model_dir), "seq_len": 32},
                "output_dir": str(tmp_path / name),
                "optim": {"type": "adamw", "lr": 1e-2},
                "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 2},
                "max_steps": 8,
                "device": "cpu",
                **values,
            }
        )

    return make


@pytest.fixture
def recorded(tmp_path, make_batch):
    """Batches in the run directory, with the state of an orchestrator."""

    def record(count: int, name: str = "run") -> None:
        batches = BatchWriter(RunPaths(tmp_path / name).rollouts)
        for step in range(count):
            batches.write(make_batch(step, seed=step), {STATE: b"after %d" % step, "rollouts.jsonl": b"{}"})

    return record


def tensors(config: TrainerConfig, step: int = 8) -> dict[str, torch.Tensor]:
    return load_weights(RunPaths(config.output_dir).weights / f"step_{step}").tensors


def are_equal(one: TrainerConfig, two: TrainerConfig) -> bool:
    ours, theirs = tensors(one), tensors(two)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_checkpoints_come_on_their_interval_and_at_the_end_and_weights_beside_them_stay(config, recorded):
    recorded(8)
    run = config(ckpt={"interval": 3, "keep_last": 2}, max_async_level=1)
    train_rl(run)
    paths = RunPaths(run.output_dir)
    assert complete_checkpoints(paths.checkpoints) == [6, 8]  # 3 went
    assert complete_steps(paths.weights) == [5, 6, 7, 8]  # [6 - 1, 6], and the last three
    assert complete_steps(paths.rollouts) == [7]
    assert (paths.checkpoints / "step_6" / ORCHESTRATOR_STATE).read_bytes() == b"after 5"
    verify(paths.checkpoints / "step_6")
    events = [(entry.event, entry.step) for entry in read_journal(paths.journal) if entry.step in (6, 5)]
    in_order = ["batch_received", "batch_consumed", "weights_begun", "checkpoint_begun", "checkpoint_complete"]
    of_step_5 = [("batch_received", 5), ("batch_consumed", 5), ("weights_begun", 6)]
    assert [event for event in events if event in of_step_5] == of_step_5
    assert events.index(("checkpoint_begun", 6)) < events.index(("checkpoint_complete", 6))
    assert {event for event, _ in events} >= {*in_order, "weights_published"}


def test_without_ckpt_nothing_is_saved_and_every_batch_stays(config, recorded):
    recorded(8)
    run = config()
    train_rl(run)
    paths = RunPaths(run.output_dir)
    assert not paths.checkpoints.exists()
    assert complete_steps(paths.rollouts) == list(range(8))


def test_weights_that_were_lost_with_the_machine_are_trained_again(config, recorded):
    for name in ("whole", "run"):
        recorded(4, name)
    train_rl(config("whole", max_steps=4))
    weights = RunPaths(config().output_dir).weights
    with killed_in(3), pytest.MonkeyPatch.context() as patch:
        is_due = iter([True])
        patch.setattr(CheckpointKeeper, "wants_recovery", lambda keeper: next(is_due, False))
        train_rl(config(max_steps=4, recovery_interval=1000))
    shard = weights / "step_2" / "model.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    shard = weights / "step_3" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert checkpoints.remove_lost(weights) == [2, 3]
    train_rl(config(max_steps=4, recover=True, recovery_interval=1000))
    for step in (2, 3, 4):
        ours, theirs = tensors(config(), step), tensors(config("whole"), step)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_killed_trainer_goes_on_from_its_recovery_checkpoint_and_counts_every_batch_once(config, recorded, caplog):
    for name in ("whole", "run"):
        recorded(8, name)
    train_rl(config("whole"))
    paths = RunPaths(config().output_dir)
    with killed_in(5), pytest.MonkeyPatch.context() as patch:
        is_due = iter([True, True])
        patch.setattr(CheckpointKeeper, "wants_recovery", lambda keeper: next(is_due, False))
        train_rl(config(recovery_interval=1000))
    newest = 2
    assert complete_checkpoints(paths.recovery) == [newest]
    assert complete_steps(paths.rollouts) == list(range(1, 8))
    before = {
        step: (paths.weights / f"step_{step}" / "STABLE").stat().st_mtime_ns for step in complete_steps(paths.weights)
    }
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        train_rl(config(recover=True, recovery_interval=1000))
    assert "other weights" not in caplog.text
    entries = read_journal(paths.journal)
    assert [entry.step for entry in entries if entry.event == "went_back"] == [newest]
    assert [entry.step for entry in history(entries)] == list(range(8))
    digests = [entry.facts["digest"] for entry in history(entries)]
    assert digests == [
        entry.facts["digest"] for entry in history(read_journal(RunPaths(config("whole").output_dir).journal))
    ]
    assert are_equal(config(), config("whole"))
    assert [row["step"] for row in read_metrics(paths.metrics("trainer"))] == list(range(8))
    left = set(complete_steps(paths.weights)) & before.keys()
    assert all((paths.weights / f"step_{step}" / "STABLE").stat().st_mtime_ns == before[step] for step in left)
    assert complete_checkpoints(paths.recovery) == []
    train_rl(config(recover=True))  # nothing is left to do
    assert len(read_journal(paths.journal)) == len(entries)


def test_what_a_kill_behind_the_last_step_has_left_is_removed(config, recorded):
    recorded(5)
    options = {"max_steps": 5, "max_async_level": 1, "recovery_interval": 1000}
    paths = RunPaths(config().output_dir)

    def killed(keeper: CheckpointKeeper) -> None:
        keeper._writer.finish()
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        is_due = iter([False, True])
        patch.setattr(CheckpointKeeper, "wants_recovery", lambda keeper: next(is_due, False))
        patch.setattr(CheckpointKeeper, "finish", killed)
        with pytest.raises(Killed):
            train_rl(config(**options))
    assert (complete_checkpoints(paths.recovery), complete_steps(paths.weights)) == ([2], [1, 2, 3, 4, 5])
    train_rl(config(recover=True, **options))
    assert (complete_checkpoints(paths.recovery), complete_steps(paths.weights)) == ([], [3, 4, 5])


def test_a_trainer_that_died_before_any_checkpoint_begins_again_with_the_same_batches(config, recorded):
    for name in ("whole", "run"):
        recorded(8, name)
    train_rl(config("whole"))
    with killed_in(3):
        train_rl(config())
    train_rl(config(recover=True))
    assert are_equal(config(), config("whole"))
    assert [entry.step for entry in history(read_journal(RunPaths(config().output_dir).journal))] == list(range(8))


def test_a_new_run_is_refused_where_another_left_a_checkpoint(config):
    fake = {"fake": {}}
    train_rl(config(ckpt={"interval": 4}, data=fake, max_steps=4, scheduler={"type": "constant"}))
    with pytest.raises(PrimeRLError, match=r"holds weights of an earlier run"):
        train_rl(config(data=fake))


@pytest.mark.parametrize(
    ("skip", "first", "first_lr", "is_equal"),
    [
        ({}, 4, 1e-2, True),
        ({"skip_optimizer": True}, 4, 1e-2, False),
        ({"skip_scheduler": True}, 4, 0.0, False),
        ({"skip_progress": True}, 0, 1e-2, False),
    ],
)
def test_what_is_skipped_begins_anew_and_nothing_else(config, recorded, skip, first, first_lr, is_equal):
    for name in ("whole", "run"):
        recorded(8, name)
    train_rl(config("whole"))
    with killed_in(4):
        train_rl(config(ckpt={"interval": 4}, keep_batches=True))
    train_rl(config(ckpt={"interval": 4, "resume_step": -1, **skip}))
    rows = read_metrics(RunPaths(config().output_dir).metrics("trainer"))
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[first]["optim/lr"] == first_lr
    assert are_equal(config(), config("whole")) == is_equal


def test_a_replay_gives_the_weights_of_the_run_that_recorded_to_the_last_bit(config, recorded):
    recorded(6)
    train_rl(config(max_steps=6))
    rollouts = RunPaths(config().output_dir).rollouts
    replayed = config("again", replay=str(rollouts), max_steps=6)
    train_rl(replayed)
    ours, theirs = tensors(replayed, 6), tensors(config(), 6)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert BatchReader(rollouts).read(5, timeout=1).step == 5  # nothing of the record is removed
    with pytest.raises(PrimeRLError, match="holds no recorded batch"):
        train_rl(config("none", replay=str(rollouts.parent)))


def test_a_replay_from_a_checkpoint_touches_nothing_of_the_run_that_recorded(config, recorded):
    recorded(8)
    train_rl(config(ckpt={"interval": 2}, keep_batches=True))
    paths = RunPaths(config().output_dir)
    before = sorted(paths.output_dir.rglob("*"))
    ckpt = {"interval": 3, "keep_last": 1, "output_dir": str(paths.checkpoints), "resume_step": 4}
    replayed = config("again", replay=str(paths.rollouts), ckpt=ckpt)
    train_rl(replayed)
    assert sorted(paths.output_dir.rglob("*")) == before
    assert complete_checkpoints(RunPaths(replayed.output_dir).checkpoints) == [8]
    assert are_equal(replayed, config())
    with pytest.raises(PrimeRLError, match="choose another output_dir"):
        train_rl(config(replay=str(paths.rollouts), ckpt=ckpt))
    assert sorted(paths.output_dir.rglob("*")) == before


@contextmanager
def recovery_after(*steps: int):
    """A recovery checkpoint is due after these steps of the next run."""
    with pytest.MonkeyPatch.context() as patch:
        is_due = iter(number + 1 in steps for number in range(8))
        patch.setattr(CheckpointKeeper, "wants_recovery", lambda keeper: next(is_due))
        yield


def test_what_was_skipped_is_not_in_the_recovery_checkpoint_either(config, recorded):
    recorded(8)
    with killed_in(3), recovery_after(2):
        train_rl(config(recovery_interval=1000))
    source = RunPaths(config().output_dir).recovery / "step_2"
    before = read_record(source / "trainer").schedule_step
    with killed_in(3):
        train_rl(config(recovery_interval=1000, ckpt={"resume_step": -1, "skip_scheduler": True}))
    verify(source)
    assert (before, read_record(source / "trainer").schedule_step) == (2, 0)


def test_counting_anew_survives_a_kill_at_once(config, recorded):
    """The checkpoint that it goes on from is not lost, nor its weights mistaken for those of an earlier run."""
    where = {"publish_again": WeightPublisher, "save_recovery": CheckpointKeeper, "_step": build.Trainer}
    for name in ("whole", *where):
        recorded(8, name)
        with killed_in(4):
            train_rl(config(name, ckpt={"interval": 4}, keep_batches=True))
        with publish_dir(RunPaths(config(name).output_dir).weights / "step_0") as draft:
            (draft / "content").write_text("of an earlier resume")
    values = {"ckpt": {"interval": 6, "resume_step": 4, "skip_progress": True}, "recovery_interval": 1000}
    train_rl(config("whole", **values))

    def die(*arguments, **named) -> None:
        raise Killed

    for killed_at, owner in where.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, killed_at, die)
            with pytest.raises(Killed):
                train_rl(config(killed_at, **values))
        paths = RunPaths(config(killed_at).output_dir)
        assert not (paths.weights / "step_0" / "content").exists(), killed_at
        train_rl(config(killed_at, **values, recover=True))
        assert are_equal(config(killed_at), config("whole")), killed_at
        assert [entry.step for entry in history(read_journal(paths.journal))] == list(range(8)), killed_at
        assert complete_checkpoints(paths.checkpoints) == [6, 8], killed_at


def test_beside_checkpoints_of_weights_alone_there_are_those_for_recovery(config, recorded):
    for name in ("whole", "run"):
        recorded(8, name)
    train_rl(config("whole"))
    values = {"ckpt": {"interval": 1, "weights_only": True}, "recovery_interval": 0.001}
    with killed_in(4), recovery_after(1, 3):
        train_rl(config(**values))
    paths = RunPaths(config().output_dir)
    assert (complete_checkpoints(paths.recovery), complete_checkpoints(paths.checkpoints)) == ([3], [1, 2, 3, 4])
    assert read_record(paths.recovery / "step_3" / "trainer").has_optimizer
    assert not read_record(paths.checkpoints / "step_3" / "trainer").has_optimizer
    train_rl(config(**values, recover=True))
    assert are_equal(config(), config("whole"))
    assert complete_checkpoints(paths.checkpoints) == list(range(1, 9))


def test_a_run_that_goes_on_has_a_recovery_checkpoint_after_its_first_step(config, recorded):
    recorded(8)
    with killed_in(3):
        train_rl(config(recovery_interval=1000))
    recovery = RunPaths(config().output_dir).recovery
    assert complete_checkpoints(recovery) == []
    for step in (1, 2):
        with killed_in(step):
            train_rl(config(recover=True, recovery_interval=1000))
        assert complete_checkpoints(recovery) == [step]


def test_weights_beside_a_recovery_checkpoint_go_with_it_at_the_end(config, recorded):
    recorded(8)
    with recovery_after(4):
        train_rl(config(recovery_interval=1000, max_async_level=1))
    paths = RunPaths(config().output_dir)
    assert complete_checkpoints(paths.recovery) == []
    assert complete_steps(paths.weights) == [6, 7, 8]


def test_under_a_launcher_the_recovery_checkpoint_stays_and_a_run_may_be_given_more_steps(
    config, recorded, monkeypatch
):
    constant = {"scheduler": {"type": "constant"}}
    for name in ("whole", "run"):
        recorded(10, name)
    train_rl(config("whole", max_steps=10, **constant))
    monkeypatch.setenv(activity.SUPERVISED, "trainer")
    with recovery_after(4):
        train_rl(config(recovery_interval=1000, max_async_level=1, **constant))
    paths = RunPaths(config().output_dir)
    assert complete_checkpoints(paths.recovery) == [4]
    assert complete_steps(paths.weights) == [6, 7, 8], "but no weights beside it"
    assert min(complete_steps(paths.rollouts)) == 3
    train_rl(config(recover=True, max_steps=10, recovery_interval=1000, max_async_level=1, **constant))
    ours, theirs = (tensors(one, 10) for one in (config(), config("whole")))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [entry.step for entry in history(read_journal(paths.journal))] == list(range(10))


def test_a_run_without_its_merged_model_is_not_complete(config, recorded, model_dir):
    recorded(8)
    lora = {"rank": 2, "target_modules": ["q_proj"], "merge": True}
    values = {"model": {"name": str(model_dir), "seq_len": 32, "lora": lora}, "ckpt": {"interval": 8}}
    train_rl(config(**values))
    merged = RunPaths(config().output_dir).merged / "step_8"
    before = (merged / "STABLE").read_bytes()
    shutil.rmtree(merged)
    train_rl(config(**values, recover=True))
    assert (merged / "STABLE").read_bytes() == before


def test_going_on_beyond_the_last_step_is_refused_before_anything_is_set_aside(config):
    values = {"data": {"fake": {}}, "scheduler": {"type": "constant"}}
    train_rl(config(ckpt={"interval": 2}, max_steps=4, **values))
    paths = RunPaths(config().output_dir)
    with pytest.raises(PrimeRLError, match=r"at step 2 already, beyond max_steps = 1"):
        train_rl(config(ckpt={"resume_step": 2}, max_steps=1, **values))
    assert complete_checkpoints(paths.checkpoints) == [2, 4]
    assert not paths.superseded.exists()


def test_a_run_that_meets_the_checkpoints_of_another_ends_for_good_and_never_takes_them_for_its_own(config, tmp_path):
    values = {"data": {"fake": {}}, "scheduler": {"type": "constant"}}
    values["ckpt"] = {"interval": 4, "output_dir": str(tmp_path / "shared")}
    train_rl(config("old", **values))
    with pytest.raises(PrimeRLError, match=r"shared holds checkpoints of an earlier run \(up to step 8\)") as caught:
        train_rl(config("new", max_steps=6, **values))
    assert caught.value.is_final
    with pytest.raises(PrimeRLError, match=r"at step 8 already, beyond max_steps = 6") as caught:
        train_rl(config("new", max_steps=6, recover=True, **values))
    assert caught.value.is_final
    assert complete_steps(RunPaths(config("new").output_dir).weights) == []
    assert complete_checkpoints(tmp_path / "shared") == [4, 8]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_serves(config, monkeypatch):
    values = {"data": {"fake": {"generate_samples": True}}, "ckpt": {"interval": 2, "save_async": True}}
    save, calls = writer.save_state, []

    def full(directory, *arguments) -> None:
        calls.append(directory)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(directory))
        save(directory, *arguments)

    monkeypatch.setattr(writer, "save_state", full)
    with pytest.raises(PrimeRLError, match=r"cannot write .*checkpoints/step_4"):
        train_rl(config(**values))
    root = RunPaths(config().output_dir).checkpoints
    assert complete_checkpoints(root) == [2]
    verify(root / "step_2")
    train_rl(config(**values | {"ckpt": {"interval": 2, "resume_step": -1}}))
    assert complete_checkpoints(root) == [2, 4, 6, 8]
    train_rl(config("whole", **values | {"ckpt": None}))
    assert are_equal(config(), config("whole"))
