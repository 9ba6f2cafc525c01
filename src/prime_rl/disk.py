"""What a machine may refuse: a full disk, a read-only directory, no more open files. In words, and with a safe end.

    what a run cannot do without    batches, weights, checkpoints, configurations    `refused`: a DiskError ends the run
    what is only looked at          metrics, events, logs, curves                    `LooseFile`: dropped and counted

The streams of a process, which may be files on the same disk, are `logs`' own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prime_rl.errors import ArtifactError, ConfigError, DiskError, Unreadable

MIB: Final = 2**20
MAX_HANDLES: Final = 2**16
"""Open files that a process asks for, where it may: a connection for each of tens of thousands of rollouts."""
FEW_HANDLES: Final = 1024

_NO_RIGHT: Final = "this user may not write there: change who may (chown, chmod), or choose another output_dir"
_NO_READING: Final = "this user may not read it: change who may (chown, chmod)"
_REFUSALS: Final = {
    errno.ENOSPC: "the disk is full ({free}): free some of it, or choose an output_dir on another disk",
    errno.EDQUOT: "your quota on this disk is used up ({free} of the whole disk): free some of it",
    errno.EFBIG: "no process here may write a file that large (ulimit -f): raise that limit",
    errno.EROFS: "the file system is read-only: choose an output_dir that can be written, or mount it anew",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EIO: "the disk reports an input/output error and may be broken (see dmesg): choose an output_dir elsewhere",
    errno.EMFILE: "this process has as many files and connections open as it may, {handles}: allow more in the shell "
    "that starts it, with ulimit -n 65536",
    errno.ENFILE: "this machine has as many files open as it may (sysctl fs.file-max): end what holds them",
}
"""What the machine says, and what to do about it."""

_logger = logging.getLogger(__name__)  # `logs` imports this module


def is_refusal(error: OSError) -> bool:
    """Whether it is the machine that refuses, whatever was written where."""
    return error.errno in _REFUSALS


def refusal(error: OSError, path: Path | str) -> str:
    """What the machine refuses, in words that say what to do; `path` is what was to be written.

    Example: "the disk is full (0.1 of 8070.4 MiB are free): free some of it, or choose an output_dir on another disk"
    """
    template = _REFUSALS.get(error.errno or 0)
    if template is None:
        return error.strerror or str(error)
    return template.format(free=_free(Path(path)), handles=max_handles())


def refused(error: OSError, path: Path | str) -> DiskError:
    """That `path`, which the run cannot do without, cannot be written, and what to do."""
    again = "; then start the same command again, or resume from the last checkpoint" if is_refusal(error) else ""
    return DiskError(f"cannot write {path}: {refusal(error, path)}{again}")


def cannot_read(error: OSError, path: Path) -> ArtifactError:
    """That `path` of a directory that was published is gone, which is damage; or that nobody can tell now."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return ArtifactError(f"cannot read {path}: {error.strerror or error}")
    why = _NO_READING if error.errno in (errno.EACCES, errno.EPERM) else refusal(error, path)
    return Unreadable(
        f"cannot read {path}: {why}. What it is in may be whole, so nothing is changed: start the same command again "
        f"once it can be read; where it never will be, move {path.parent.name} out of the run directory first"
    )


def refusal_behind(errors: Iterable[BaseException], path: Path) -> OSError | None:
    """The refusal of the machine that errors of a library come from, which writes `path`; None: they have other causes.

    Where the library has lost it, a disk without room tells.
    """
    for error in _causes(errors):
        if isinstance(error, OSError) and is_refusal(error):
            return error
    if shutil.disk_usage(_nearest(path)).free < MIB:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _causes(errors: Iterable[BaseException]) -> Iterator[BaseException]:
    """The errors, and all that they come from, each once."""
    known: dict[int, BaseException] = {}
    waiting = list(errors)
    while waiting:
        error = waiting.pop()
        if id(error) not in known:
            known[id(error)] = error
            yield error
            waiting += [one for one in (error.__cause__, error.__context__) if one is not None]
            waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _free(path: Path) -> str:
    usage = shutil.disk_usage(_nearest(path))
    return f"{usage.free / MIB:.1f} of {usage.total / MIB:.1f} MiB are free"


def _nearest(path: Path) -> Path:
    """`path`, or what is there of the way to it."""
    return next(found for found in (path, *path.absolute().parents) if found.exists())


def check_writable(*directories: Path) -> None:
    """Write a file into each, and remove it; where one is not there yet, into what it would be made in.

    Raises: ConfigError saying which one cannot be written and why.
    """
    for directory in directories:
        probe = _nearest(directory) / f".probe-{os.getpid()}"
        try:
            try:
                probe.write_bytes(b"written to see whether that can be done\n")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be written: {refusal(error, directory)}") from None


def max_handles() -> int:
    """How many files and connections this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_handles() -> str | None:
    """Let this process and those that it starts have more files open, as far as the machine allows it unasked.

    Shells often start with 1024, which an orchestrator or a server with as many connections passes. Returns what to
    say where so few are left; else None.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_HANDLES if hard == resource.RLIM_INFINITY else min(hard, MAX_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # as where a container forbids it: then it stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if max_handles() >= FEW_HANDLES:
        return None
    return (
        f"a process may have {max_handles()} files and connections open here (ulimit -Hn), and each rollout under way "
        "takes one: where rollouts fail for want of a connection, allow more, or lower max_concurrent"
    )


def no_handles(error: BaseException) -> str | None:
    """That files or connections ran out, in words, where that is behind an error of a library."""
    causes = [one for one in _causes([error]) if isinstance(one, OSError)]
    if any(isinstance(one, socket.gaierror) for one in causes):  # who looks a name up in a file loses why he cannot
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as refused_now:
            causes.append(refused_now)
    ran_out = next((one for one in causes if one.errno in (errno.EMFILE, errno.ENFILE)), None)
    return None if ran_out is None else refusal(ran_out, Path())


class LooseFile:
    """Lines that a run can do without: what the disk refuses is dropped and counted, and said once.

    A line is in the file whole or not at all, also where several processes append to it, and where one was killed while
    it wrote. Once the disk takes lines again, they are written again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self.num_dropped = 0

    def append(self, line: bytes) -> None:
        """Write `line`, which ends with a newline."""
        try:
            self._append(line)
        except OSError as error:
            self.num_dropped += 1
            if self.num_dropped == 1:
                _logger.warning("%s is not written, and the run goes on: %s", self._path, refusal(error, self._path))

    def close(self) -> None:
        """Say how much is missing."""
        if self.num_dropped:
            _logger.warning("%d lines are not in %s", self.num_dropped, self._path)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        append_whole(self._file, line)


def append_whole(file: int, lines: bytes) -> None:
    """Append `lines` to a file that is open for reading and appending: all of them, or nothing.

    Raises: OSError.
    """
    with _locked(file):
        end = _end_of_lines(file)
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, end)
            raise


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Alone among the processes that append; on a file system without locks, not."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _end_of_lines(file: int) -> int:
    """The size of the file, once what somebody was killed at is cut off its end."""
    size = end = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(file, end)
    return end
