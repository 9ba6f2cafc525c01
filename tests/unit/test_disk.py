import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doubles.disks import small_disk

from prime_rl import disk
from prime_rl.disk import (
    LooseFile,
    allow_handles,
    check_writable,
    is_refusal,
    max_handles,
    no_handles,
    refusal,
    refused,
)
from prime_rl.errors import ConfigError


def limit_file_size(num_bytes: int) -> None:
    """No file of this process may grow beyond that: a full disk for whoever may not mount one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"the disk is full \([\d.]+ of [\d.]+ MiB are free\): free some of it"),
        (errno.EDQUOT, "your quota on this disk is used up"),
        (errno.EROFS, "the file system is read-only: choose an output_dir that can be written"),
        (errno.EACCES, "this user may not write there"),
        (errno.EMFILE, rf"as it may, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: allow more .* ulimit -n"),
        (errno.EISDIR, "Is a directory"),
    ],
)
def test_what_the_machine_refuses_is_said_in_words_with_what_to_do(tmp_path, number, words):
    error = OSError(number, os.strerror(number))
    said = str(refused(error, tmp_path / "missing" / "file"))
    assert re.search(words, said), said
    assert refusal(error, tmp_path) in said
    assert is_refusal(error) == (number != errno.EISDIR)


def test_of_a_look_at_directories_that_can_be_written_nothing_stays(tmp_path):
    (tmp_path / "run").mkdir()
    check_writable(tmp_path / "run", tmp_path / "not" / "yet")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_what_is_no_directory_is_refused_in_words(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="run cannot be written: Not a directory"):
        check_writable(tmp_path / "run")


def test_a_read_only_directory_is_refused_in_words(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as mounted:
        mounted.make_read_only()
        with pytest.raises(ConfigError, match="disk/run cannot be written: the file system is read-only"):
            check_writable(mounted.root / "run")


def test_a_full_disk_is_refused_in_words(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as mounted:
        mounted.fill()
        with pytest.raises(ConfigError, match=r"cannot be written: the disk is full \(0\.0 of 1\.0 MiB are free\)"):
            check_writable(mounted.root)


def test_that_files_ran_out_is_found_behind_the_errors_of_a_library():
    def raised_from(cause: BaseException) -> BaseException:
        try:
            raise ConnectionError("All connection attempts failed") from cause
        except ConnectionError as error:
            return error

    ran_out = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    words = f"this process has as many files and connections open as it may, {max_handles()}: allow more"
    for cause in (ran_out, ExceptionGroup("several", [OSError("refused"), ran_out]), raised_from(ran_out)):
        assert (no_handles(raised_from(cause)) or "").startswith(words)
    for cause in (OSError(errno.ECONNREFUSED, "refused"), OSError(errno.EACCES, "no right"), ValueError()):
        assert no_handles(raised_from(cause)) is None


def test_a_process_may_have_as_many_files_open_as_the_machine_allows_unasked(monkeypatch):
    code = "from prime_rl.disk import *; said = allow_handles(); print(max_handles(), said)"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("300 a process may have 300 files and connections open here (ulimit -Hn), and")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(disk, "MAX_HANDLES", 10)
    assert allow_handles() is None
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before  # never fewer than there are


def test_lines_that_a_full_disk_refuses_are_dropped_counted_and_said_once(tmp_path, caplog):
    with small_disk(tmp_path / "disk", mib=1) as mounted:
        file = LooseFile(mounted.root / "sub" / "lines")
        file.append(b"first\n")
        mounted.fill()
        for _ in range(3):
            file.append(b"x" * 5000 + b"\n")  # more than what is left of the file's page: a part of it would fit
        assert (mounted.root / "sub" / "lines").read_bytes() == b"first\n"
        mounted.free()
        file.append(b"last\n")
        assert (mounted.root / "sub" / "lines").read_bytes() == b"first\nlast\n"
        file.close()
    assert [record.message.partition("disk/")[2].partition(" (")[0] for record in caplog.records] == [
        "sub/lines is not written, and the run goes on: the disk is full",
        "sub/lines",
    ]
    assert caplog.records[1].message.startswith("3 lines are not in")


def test_lines_beyond_the_size_that_a_file_may_have_are_dropped(tmp_path):
    path = tmp_path / "lines"
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.unit.test_disk import limit_file_size
from prime_rl.disk import LooseFile
limit_file_size(10)
from pathlib import Path
file = LooseFile(Path({str(path)!r}))
for word in (b"one", b"twooooooooo", b"three"):
    file.append(word + b"\\n")
print(file.num_dropped)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert path.read_bytes() == b"one\nthree\n"


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path, caplog):
    (tmp_path / "sub").write_text("in the way")
    file = LooseFile(tmp_path / "sub" / "lines")
    file.append(b"one\n")
    (tmp_path / "sub").unlink()
    file.append(b"two\n")
    assert (tmp_path / "sub" / "lines").read_bytes() == b"two\n"
    assert file.num_dropped == 1


def test_what_somebody_was_killed_at_is_cut_off(tmp_path):
    (tmp_path / "lines").write_bytes(b"one\ntw")
    first, second = LooseFile(tmp_path / "lines"), LooseFile(tmp_path / "lines")
    first.append(b"three\n")
    second.append(b"four\n")
    first.append(b"five\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nthree\nfour\nfive\n"
