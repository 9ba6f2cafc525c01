"""What a process that was killed between any two file operations leaves, and what the next start makes of it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.errors import ArtifactError
from prime_rl.transport.checkpoints import choose, newest_sound
from prime_rl.transport.manifest import complete_steps, publish_dir, read_verified, remove_dir, remove_drafts

OPERATIONS = ("rename", "unlink", "rmdir")


def publish(root: Path, step: int, content: bytes) -> None:
    with publish_dir(root / f"step_{step}", replaces=True) as draft:
        (draft / "trainer").mkdir()
        for name in ("a", "b"):
            (draft / "trainer" / name).write_bytes(content)


def replace(root: Path) -> None:
    publish(root, 30, b"new")


def remove(root: Path) -> None:
    remove_dir(root / "step_30")


def kills(doing: Callable[[Path], None], tmp_path: Path) -> Iterator[Path]:
    """The root after each kill, and last the one that nobody was killed at."""
    for number in range(1, 100):
        root = tmp_path / str(number)
        publish(root, 30, b"old")
        child = os.fork()
        if child == 0:
            _die_at(number)
            doing(root)
            os._exit(0)
        was_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        yield root
        if not was_killed:
            return


def _die_at(number: int) -> None:
    """Before file operation `number`. Only in a child: nothing is put back."""
    count = 0

    def dying(operation: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **named: object) -> None:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            operation(*arguments, **named)

        return call

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads: the child only renames
def test_whoever_is_killed_at_replacing_a_checkpoint_leaves_the_old_one_or_the_new_one(tmp_path):
    found = []
    for root in kills(replace, tmp_path):
        (root / ".step_7.tmp-1").mkdir()
        chosen = newest_sound([root])
        assert chosen == root / "step_30" == choose([root], 30)
        found.append(read_verified(chosen, "trainer/a"))
        remove_drafts(root)
        assert os.listdir(root) == ["step_30"]
        publish(root, 31, b"next")
        assert complete_steps(root) == [30, 31]
    assert found == sorted(found, reverse=True), "once the new one is there, it stays"
    assert {b"old", b"new"} == set(found)
    assert len(found) >= 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whoever_is_killed_at_removing_a_checkpoint_leaves_all_of_it_or_nothing(tmp_path):
    found = []
    for root in kills(remove, tmp_path):
        chosen = newest_sound([root])
        found.append(chosen is not None)
        remove_drafts(root)
        assert os.listdir(root) == (["step_30"] if chosen else [])
        if chosen is None:
            with pytest.raises(ArtifactError, match="there is no complete one"):
                choose([root], 30)
    assert found[0]
    assert not any(found[1:])
    assert len(found) >= 5


def test_a_disk_that_refuses_the_new_one_leaves_the_old_one(tmp_path, monkeypatch):
    publish(tmp_path, 30, b"old")
    rename = os.rename

    def refusing(source: Path, target: Path) -> None:
        if ".tmp-" in str(source) and not Path(target).exists():
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(ArtifactError, match=r"cannot write .*step_30: the disk is full"):
        publish(tmp_path, 30, b"new")
    assert read_verified(tmp_path / "step_30", "trainer/b") == b"old"
    assert os.listdir(tmp_path) == ["step_30"]
