"""Small disks for tests: real file systems that are full, or read-only, which root cannot write either."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount_point: Path, *, mib: int) -> Iterator[Disk]:
    """A file system of `mib` MiB in memory; the test is skipped where this user may not mount one."""
    mount_point.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(mount_point))
    try:
        yield Disk(mount_point)
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


class Disk:
    """A mounted one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ballast = root / "ballast"

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Take all the room but for `leave_bytes`, and no less than that is left."""
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        if leave_bytes:
            with self._ballast.open("r+b") as file:
                file.truncate(max(0, self._ballast.stat().st_size - leave_bytes))

    def free(self) -> None:
        """Give back what `fill` took."""
        self._ballast.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        _mount("-o", "remount,ro", str(self.root))

    def make_writable(self) -> None:
        _mount("-o", "remount,rw", str(self.root))


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
