import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prime_rl.errors import ArtifactError, Unreadable
from prime_rl.transport.checkpoints import (
    LATEST,
    ORCHESTRATOR_STATE,
    choose,
    complete_checkpoints,
    newest_sound,
    remove_lost,
    step_of,
    verify,
)
from prime_rl.transport.manifest import draft_dir, publish_dir


def publish(root: Path, step: int) -> Path:
    with publish_dir(root / f"step_{step}") as directory:
        state = directory / ORCHESTRATOR_STATE
        state.parent.mkdir()
        state.write_bytes(b"state %d" % step)
    return root / f"step_{step}"


def damage(checkpoint: Path) -> None:
    (checkpoint / ORCHESTRATOR_STATE).write_bytes(b"STATE " + checkpoint.name.removeprefix("step_").encode())


def test_only_complete_checkpoints_count(tmp_path):
    assert complete_checkpoints(tmp_path / "none") == []
    for step in (20, 10):
        publish(tmp_path, step)
    (tmp_path / "step_30").mkdir()
    (tmp_path / "step_30" / "half").write_text("")
    (tmp_path / ".step_40.tmp-1").mkdir()
    assert complete_checkpoints(tmp_path) == [10, 20]
    assert choose([tmp_path], LATEST) == tmp_path / "step_20"
    assert step_of(tmp_path / "step_20") == 20


def test_the_latest_of_several_roots_or_the_one_that_was_asked_for_is_chosen(tmp_path):
    publish(tmp_path / "checkpoints", 10)
    publish(tmp_path / "recovery", 13)
    roots = [tmp_path / "checkpoints", tmp_path / "recovery"]
    assert choose(roots, LATEST) == tmp_path / "recovery" / "step_13"
    assert choose(roots, 10) == tmp_path / "checkpoints" / "step_10"
    assert newest_sound(roots) == tmp_path / "recovery" / "step_13"


def test_of_two_of_one_step_the_sound_one_is_chosen_and_else_that_of_the_earlier_root(tmp_path):
    roots = [tmp_path / "checkpoints", tmp_path / "recovery"]
    first, second = (publish(root, 5) for root in roots)
    assert choose(roots, 5) == first
    damage(first)
    assert choose(roots, 5) == second
    assert choose(roots, LATEST) == second


def test_a_step_without_a_complete_checkpoint_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(ArtifactError, match=r"no checkpoint in .* there is no complete one"):
        choose([tmp_path], LATEST)
    publish(tmp_path, 10)
    publish(tmp_path, 20)
    with pytest.raises(ArtifactError, match=r"no complete checkpoint of step 15 .* complete are: 10, 20"):
        choose([tmp_path], 15)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(tmp_path):
    publish(tmp_path, 10)
    damage(publish(tmp_path, 20))
    damage(publish(tmp_path, 30))
    with pytest.raises(ArtifactError, match=r"step_30/orchestrator/state.msgpack is damaged.*ckpt.resume_step = 10"):
        choose([tmp_path], LATEST)
    with pytest.raises(ArtifactError, match=r"step 20 cannot be used.*ckpt.resume_step = 10"):
        choose([tmp_path], 20)
    damage(tmp_path / "step_10")
    with pytest.raises(ArtifactError, match=r"step 10 cannot be used.*none before it that is whole"):
        choose([tmp_path], 10)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_when_a_run_goes_on(tmp_path, caplog):
    publish(tmp_path, 10)
    damage(publish(tmp_path, 20))
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        assert newest_sound([tmp_path]) == tmp_path / "step_10"
    assert "step_20 is passed over" in caplog.text
    damage(tmp_path / "step_10")
    assert newest_sound([tmp_path]) is None


def test_what_a_crash_of_the_machine_has_cut_is_removed_where_it_was_not_forced_to_disk(tmp_path):
    for step in range(1, 7):
        with draft_dir(tmp_path / f"step_{step}", durable=step == 1) as draft:
            (draft.directory / "a").write_text("alpha")
    (tmp_path / "step_1" / "a").write_text("")  # forced to disk: it is not read
    (tmp_path / "step_3" / "a").write_text("alp")
    (tmp_path / "step_4" / "a").write_bytes(bytes(5))
    (tmp_path / "step_5" / "STABLE").write_text("")
    (tmp_path / "step_6" / "STABLE").unlink()
    assert remove_lost(tmp_path) == [3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert remove_lost(tmp_path / "nothing") == []


def test_verify_names_a_missing_file(tmp_path):
    checkpoint = publish(tmp_path, 1)
    verify(checkpoint)
    (checkpoint / ORCHESTRATOR_STATE).unlink()
    with pytest.raises(ArtifactError, match=r"step_1/orchestrator/state.msgpack"):
        verify(checkpoint)


@contextmanager
def refusing(directory: Path, code: int) -> Iterator[None]:
    """No file in `directory` can be opened; of a server of files this cannot be had in a test."""
    real = Path.open

    def opening(path: Path, *arguments, **named):
        if path.is_relative_to(directory):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opening)
        yield


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_what_cannot_be_read_now_is_neither_passed_over_nor_removed(tmp_path, code):
    for step in (10, 20):
        publish(tmp_path / "checkpoints", step)
    for step in (19, 20):
        with draft_dir(tmp_path / "weights" / f"step_{step}", durable=step == 19) as draft:
            (draft.directory / "a").write_text("alpha")
    for content in (ORCHESTRATOR_STATE, "STABLE"):
        with refusing(tmp_path / "checkpoints" / "step_20" / content, code):
            with pytest.raises(Unreadable, match=r"cannot read .*checkpoints/step_20/.* may be whole"):
                newest_sound([tmp_path / "checkpoints"])
            with pytest.raises(Unreadable, match=r"cannot read .*checkpoints/step_20/.* may be whole"):
                choose([tmp_path / "checkpoints"], LATEST)
    for content, step in (("a", 20), ("STABLE", 20), ("STABLE", 19)):
        with (
            refusing(tmp_path / "weights" / f"step_{step}" / content, code),
            pytest.raises(Unreadable, match=rf"cannot read .*weights/step_{step}/{content}: "),
        ):
            remove_lost(tmp_path / "weights")
    assert newest_sound([tmp_path / "checkpoints"]) == tmp_path / "checkpoints" / "step_20"
    assert remove_lost(tmp_path / "weights") == []
    assert len(list((tmp_path / "weights").iterdir())) == 2


def test_of_a_checkpoint_that_cannot_be_read_now_nobody_says_that_it_is_damaged(tmp_path):
    publish(tmp_path, 10)
    damage(publish(tmp_path, 20))
    with (
        refusing(tmp_path / "step_10", errno.ESTALE),
        pytest.raises(
            ArtifactError, match=r"step 20 cannot be used: .*; of the one before it nobody can tell: .*Stale"
        ),
    ):
        choose([tmp_path], LATEST)


def test_files_that_ran_out_do_not_damage_a_checkpoint(tmp_path):
    publish(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    taken: list[int] = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    try:
        with pytest.raises(Unreadable, match="as many files and connections open as it may"):
            verify(tmp_path / "step_10")
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert newest_sound([tmp_path]) == tmp_path / "step_10"
