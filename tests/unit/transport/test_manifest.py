import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doubles.disks import small_disk

from prime_rl.errors import ArtifactError, DiskError
from prime_rl.paths import drafts
from prime_rl.transport import manifest
from prime_rl.transport.manifest import (
    complete_steps,
    latest_step,
    publish_dir,
    read_verified,
    remove_dir,
    remove_drafts,
    verify,
)


def publish(final: Path, **contents: str) -> None:
    with publish_dir(final) as directory:
        for name, text in contents.items():
            (directory / name).write_text(text)


def test_a_published_directory_holds_its_files_and_a_marker_that_describes_them(tmp_path):
    with publish_dir(tmp_path / "weights" / "step_3") as directory:
        (directory / "a.txt").write_text("alpha")
        (directory / "sub").mkdir()
        (directory / "sub" / "b.txt").write_text("")
        assert not (tmp_path / "weights" / "step_3").exists()
        assert complete_steps(tmp_path / "weights") == []
    final = tmp_path / "weights" / "step_3"
    marker = json.loads((final / "STABLE").read_text())
    assert (marker["format"], marker["step"]) == (1, 3)
    assert {name: entry["bytes"] for name, entry in marker["files"].items()} == {"a.txt": 5, "sub/b.txt": 0}
    assert verify(final).step == 3
    assert read_verified(final, "a.txt") == b"alpha"
    assert os.listdir(tmp_path / "weights") == ["step_3"]


def test_an_error_inside_the_block_leaves_nothing_and_is_passed_on(tmp_path):
    def publish_and_fail() -> None:
        with publish_dir(tmp_path / "step_1") as directory:
            (directory / "a.txt").write_text("alpha")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        publish_and_fail()
    assert os.listdir(tmp_path) == []


def test_a_step_is_never_overwritten(tmp_path):
    publish(tmp_path / "step_1", a="old")
    with pytest.raises(ArtifactError, match="step_1 exists already"):
        publish(tmp_path / "step_1", a="new")
    assert read_verified(tmp_path / "step_1", "a") == b"old"


def test_the_leftover_of_a_killed_writer_is_removed_by_the_next(tmp_path):
    (tmp_path / ".step_1.tmp-1").mkdir()
    (tmp_path / ".step_1.tmp-1" / "half").write_text("ha")
    assert complete_steps(tmp_path) == []
    publish(tmp_path / "step_1", a="whole")
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_refusing_disk_is_named_and_nothing_becomes_visible(tmp_path, monkeypatch):
    calls = {"fsync": 0}
    real = os.fsync

    def full_disk_at(limit: int):
        def fsync(descriptor: int) -> None:
            calls["fsync"] += 1
            if calls["fsync"] == limit:
                raise OSError(28, "No space left on device")
            real(descriptor)

        return fsync

    # Two files, the marker and the directory itself are forced to disk before the rename.
    for limit in range(1, 5):
        calls["fsync"] = 0
        with monkeypatch.context() as patch:
            patch.setattr(manifest.os, "fsync", full_disk_at(limit))
            with pytest.raises(DiskError, match=r"cannot write .*step_1: the disk is full .* same command again"):
                publish(tmp_path / "step_1", a="alpha", b="beta")
        assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_what_is_there_and_takes_the_next_once_it_has_room(tmp_path):
    with small_disk(tmp_path / "disk", mib=2) as disk:
        root = disk.root / "weights"
        publish(root / "step_1", a="whole")
        disk.fill(leave_bytes=1 << 16)
        with pytest.raises(DiskError, match=r"weights/step_2: the disk is full \(\d"):
            publish(root / "step_2", a="x" * (1 << 17))
        assert os.listdir(root) == ["step_1"]
        assert verify(root / "step_1").step == 1
        disk.free()
        publish(root / "step_2", a="x" * (1 << 17))
        assert complete_steps(root) == [1, 2]


# Dies at the k-th file operation (open, mkdir, rename, remove) that Python's audit hooks report, for every k.
KILLED_WRITER = """
import os, sys
from pathlib import Path
from prime_rl.transport.manifest import publish_dir

root = Path(sys.argv[1])

def write(root):
    with publish_dir(root / "step_7") as directory:
        (directory / "a.txt").write_text("alpha")
        (directory / "b.txt").write_text("beta")

def die_at(k):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.scandir"):
            seen += 1
            if seen == k:
                os._exit(9)
    return hook

k = 0
while True:
    k += 1
    child = os.fork()
    if child == 0:
        sys.addaudithook(die_at(k))
        write(root / str(k))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(k - 1)
"""


def test_a_writer_killed_between_any_two_steps_shows_nothing_or_everything(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", KILLED_WRITER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    num_kills = int(done.stdout)
    assert num_kills >= 10
    visible = []
    for k in range(1, num_kills + 1):
        root = tmp_path / str(k)
        visible += complete_steps(root)
        if (root / "step_7").exists():
            assert set(verify(root / "step_7").files) == {"a.txt", "b.txt"}
        else:
            publish(root / "step_7", a="second attempt")
            assert os.listdir(root) == ["step_7"]
    assert visible.count(7) < num_kills
    assert complete_steps(tmp_path / str(num_kills + 1)) == [7]


def test_a_damaged_file_is_named(tmp_path):
    final = tmp_path / "step_1"
    publish(final, a="alpha", b="beta")
    (final / "a").write_text("alphA")
    with pytest.raises(ArtifactError, match=r"step_1/a is damaged: its digest is"):
        verify(final)
    (final / "a").write_text("alp")
    with pytest.raises(ArtifactError, match=r"step_1/a has 3 bytes, its marker says 5"):
        verify(final)
    with pytest.raises(ArtifactError, match=r"step_1/a has 3 bytes"):
        read_verified(final, "a")
    (final / "a").unlink()
    with pytest.raises(ArtifactError, match=r"cannot read .*step_1/a"):
        verify(final)
    with pytest.raises(ArtifactError, match=r"cannot read .*step_1/a"):
        read_verified(final, "a")


def test_a_file_that_the_marker_does_not_list_is_not_read(tmp_path):
    publish(tmp_path / "step_1", a="alpha")
    with pytest.raises(ArtifactError, match="does not list other"):
        read_verified(tmp_path / "step_1", "other")


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (None, "has no marker, so it was not written completely"),
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 2, "step": 1, "files": {}}', "has format 2"),
    ],
)
def test_a_directory_without_a_readable_marker_is_refused(tmp_path, marker, message):
    final = tmp_path / "step_1"
    final.mkdir()
    if marker is not None:
        (final / "STABLE").write_text(marker)
    with pytest.raises(ArtifactError, match=message):
        verify(final)


def test_a_missing_directory_is_said_to_be_missing(tmp_path):
    with pytest.raises(ArtifactError, match="step_9 does not exist"):
        verify(tmp_path / "step_9")


def test_only_complete_steps_are_listed_in_numeric_order(tmp_path):
    for step in (10, 9, 2):
        publish(tmp_path / f"step_{step}", a="alpha")
    (tmp_path / "step_11").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "STABLE").write_text("{}")
    assert complete_steps(tmp_path) == [2, 9, 10]
    assert latest_step(tmp_path) == 10
    assert complete_steps(tmp_path / "absent") == []
    assert latest_step(tmp_path / "absent") is None


def test_what_killed_writers_have_left_is_removed_and_nothing_else(tmp_path):
    publish(tmp_path / "step_1", a="alpha")
    (tmp_path / "mine").mkdir()
    for leftover in (".step_1.tmp-7", ".step_20.tmp-1234", ".step_3.gone-7"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "half").write_text("ha")
    remove_drafts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step_1"]
    remove_drafts(tmp_path / "absent")


def test_a_directory_is_removed_although_an_earlier_attempt_was_not_finished(tmp_path):
    publish(tmp_path / "step_1", a="alpha")
    half = tmp_path / f".step_1.gone-{os.getpid()}"
    half.mkdir()
    (half / "b").write_text("beta")
    remove_dir(tmp_path / "step_1")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_the_disk_does_not_remove_is_no_error(tmp_path, monkeypatch, caplog):
    publish(tmp_path / "step_1", a="alpha")

    def refusing(*_args):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(manifest.os, "rename", refusing)
    remove_dir(tmp_path / "step_1")
    assert complete_steps(tmp_path) == [1]
    (message,) = caplog.messages
    assert "step_1 cannot be removed: [Errno 16] Device or resource busy" in message


def test_a_directory_that_is_half_removed_is_not_taken_for_one_that_is_written(tmp_path, monkeypatch):
    publish(tmp_path / "step_1", a="alpha")
    monkeypatch.setattr(manifest.shutil, "rmtree", lambda *args, **options: None)
    remove_dir(tmp_path / "step_1")
    assert len(os.listdir(tmp_path)) == 1
    assert drafts(tmp_path) == []
