"""Directories that appear complete or not at all, and the marker that lets a reader prove it. No torch.

A writer fills a hidden sibling of the final directory, writes the marker `STABLE` (JSON: names, sizes and
digests of all files) last, forces everything to disk and renames. So a directory under its final name is
complete whatever happened to its writer, and damage done later shows as a digest that differs.

`STABLE`: {"format": 1, "step": 3, "files": {"batch.msgpack": {"bytes": 812, "xxh3": "9f..."}}}, and for weights
`"weights"`, the PublishedWeights.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
import xxhash

from prime_rl import activity
from prime_rl.disk import cannot_read, refused
from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger
from prime_rl.paths import drafts

MARKER: Final = "STABLE"
_FORMAT: Final = 1
STEP_NAME: Final = re.compile(r"step_(\d+)")
_CHUNK_BYTES: Final = 1 << 20
_FILES_AT_ONCE: Final = 4

_logger = get_logger(__name__)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Size and XXH3-128 digest (hex) of one file."""

    bytes: int
    xxh3: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One published tensor; `checksum` is that of `transport.checksum`."""

    dtype: str
    """As torch names it, without its prefix: `bfloat16`."""
    shape: list[int]
    checksum: str


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory of weights stands for.

    `model`: its safetensors are all weights. `adapter`: a PEFT adapter of the model that the server was started with.
    `nccl`: no tensors; the trainer sends them, in the order of `tensors`, once `ready_file` of the directory is there.
    """

    kind: Literal["model", "adapter", "nccl"]
    digest: str
    """`transport.checksum.combined` of `tensors`: what a server must report after it took them."""
    tensors: dict[str, TensorEntry]
    """Under their Hugging Face names, in the order in which they are sent."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the marker. `files` is keyed by path relative to the directory."""

    format: int
    step: int
    files: dict[str, FileEntry]
    weights: PublishedWeights | None = None
    """Only of directories of weights."""
    durable: bool = True
    """Whether all of it was forced to disk."""


@dataclass(slots=True)
class Draft:
    """A directory that is being written."""

    directory: Path
    measured: dict[str, FileEntry] = field(default_factory=dict)
    """Files by name that their writer has measured already; the others are read once more for their digests."""
    weights: PublishedWeights | None = None
    """Goes into the marker."""


@contextmanager
def publish_dir(final: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a hidden directory that becomes `final` (`<root>/step_N`) when the block ends without error.

    `replaces`: in place of the one that is there, if there is one, which stays until then. Between the two renames of
    that it has another name, and whoever is killed there leaves it to `put_back`.

    One writer per `final` at a time. On error nothing is left behind; a killed writer leaves only the hidden
    directory, which `remove_drafts` removes, and so does the next writer of the same step.

    Raises: ArtifactError when `final` exists already; DiskError, which is one, when the disk refuses.
    """
    with draft_dir(final, replaces=replaces) as draft:
        yield draft.directory


@contextmanager
def draft_dir(final: Path, *, durable: bool = True, replaces: bool = False) -> Iterator[Draft]:
    """As `publish_dir`, for a writer that knows digests or weights.

    Not `durable`: nothing is forced to disk, which takes a second a gigabyte. Readers see the same, a killed process
    included; only a crash of the machine may leave a directory whose digests then differ.
    """
    step = _step_of(final)
    if final.exists() and not replaces:
        raise ArtifactError(f"{final} exists already and is never overwritten; choose another output_dir or remove it")
    temporary = final.parent / f".{final.name}.tmp-{os.getpid()}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in final.parent.glob(f".{final.name}.tmp-*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        draft = Draft(temporary)
        yield draft
        _seal(draft, step, durable=durable)
        _rename(temporary, final, replaces=replaces)
        if durable:
            _fsync(final.parent)
    except OSError as error:
        raise refused(error, final) from error
    finally:
        if replaces:
            put_back(final.parent)
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, final: Path, *, replaces: bool) -> None:
    """To the final name, from which the one that is there is moved out of the way."""
    while True:
        try:
            return os.rename(temporary, final)
        except OSError as error:
            if not replaces or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        os.rename(final, final.parent / f".{final.name}.old-{os.getpid()}")


def put_back(root: Path) -> None:
    """Give directories their names back whose writers were killed at replacing them; of those replaced, remove the old.

    What the disk refuses stays for the next one who asks.
    """
    for old in root.glob(".step_*.old-*"):
        final = root / old.name[1:].partition(".")[0]
        with suppress(OSError):  # somebody else was faster
            if not final.exists():
                os.rename(old, final)
            else:
                _remove(old, final)


def remove_dir(final: Path) -> None:
    """Remove a published directory; under its final name it is whole until it is gone.

    Where the disk refuses, a warning says so: it is nobody's any more, but nothing is wrong with what is newer.
    """
    try:
        _remove(final, final)
    except OSError as error:
        _logger.warning("%s cannot be removed: %s", final, error)


def _remove(directory: Path, final: Path) -> None:
    """Under another name: half of a directory must not be taken for one that is whole."""
    hidden = final.parent / f".{final.name}.gone-{os.getpid()}"
    shutil.rmtree(hidden, ignore_errors=True)  # what an attempt before this has left
    os.rename(directory, hidden)
    shutil.rmtree(hidden)


def remove_drafts(root: Path) -> None:
    """Remove what processes that were killed have left under `root`, where nobody writes or removes now.

    Before it, `put_back` decides what still counts of it.
    """
    for leftover in [*drafts(root), *(left for kind in ("gone", "old") for left in root.glob(f".step_*.{kind}-*"))]:
        shutil.rmtree(leftover, ignore_errors=True)


def read_manifest(directory: Path) -> Manifest:
    """Raises: ArtifactError naming the marker when it is missing or not one of ours; as `verify`."""
    marker = directory / MARKER
    try:
        manifest = msgspec.json.decode(marker.read_bytes(), type=Manifest)
    except FileNotFoundError:
        what = "has no marker, so it was not written completely" if directory.is_dir() else "does not exist"
        raise ArtifactError(f"{directory} {what} (expected {marker})") from None
    except OSError as error:
        raise cannot_read(error, marker) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{marker} is damaged: {error}") from error
    if manifest.format != _FORMAT:
        raise ArtifactError(f"{marker} has format {manifest.format}; this version reads format {_FORMAT}")
    return manifest


def verify(directory: Path, *, besides: Collection[str] = ()) -> Manifest:
    """Check the size and digest of every file against the marker, `besides` those that the caller checks.

    Raises: ArtifactError naming the first file that is missing, truncated or altered; Unreadable, which is one, where
        that cannot be told now.
    """
    manifest = read_manifest(directory)
    paths = [directory / name for name in manifest.files if name not in besides]
    with ThreadPoolExecutor(_FILES_AT_ONCE, "verify") as pool:
        for path, found in zip(paths, pool.map(_measure, paths), strict=True):
            check_file(path, expected=manifest.files[path.relative_to(directory).as_posix()], found=found)
    return manifest


def read_verified(directory: Path, name: str) -> bytes:
    """Bytes of one file of a published directory, checked against the marker while they are in memory.

    Raises: ArtifactError naming the file.
    """
    path = directory / name
    entry = read_manifest(directory).files.get(name)
    if entry is None:
        raise ArtifactError(f"{directory / MARKER} does not list {name}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise cannot_read(error, path) from error
    check_file(path, expected=entry, found=FileEntry(bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content)))
    return content


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete directory under `root`, ascending; empty when `root` does not exist."""
    if not root.is_dir():
        return []
    matches = (STEP_NAME.fullmatch(path.name) for path in root.iterdir() if (path / MARKER).is_file())
    return sorted(int(match[1]) for match in matches if match)


def latest_step(root: Path) -> int | None:
    """Newest complete step under `root`."""
    return max(complete_steps(root), default=None)


def _step_of(final: Path) -> int:
    match = STEP_NAME.fullmatch(final.name)
    assert match, f"{final} is not named step_N"
    return int(match[1])


def _seal(draft: Draft, step: int, *, durable: bool) -> None:
    """Write the marker and, where it is to last, force everything to disk; the marker after its files."""
    directory = draft.directory
    files: dict[str, FileEntry] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        if durable:
            _fsync(path)
        name = path.relative_to(directory).as_posix()
        files[name] = draft.measured.get(name) or _measure(path)
    marker = directory / MARKER
    manifest = Manifest(format=_FORMAT, step=step, files=files, weights=draft.weights, durable=durable)
    marker.write_bytes(msgspec.json.encode(manifest))
    if durable:
        for path in [marker, *(path for path in directory.rglob("*") if path.is_dir()), directory]:
            _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measure(path: Path) -> FileEntry:
    hasher = xxhash.xxh3_128()
    size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                activity.beat()
                hasher.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise cannot_read(error, path) from error
    return FileEntry(bytes=size, xxh3=hasher.hexdigest())


def check_file(path: Path, *, expected: FileEntry, found: FileEntry) -> None:
    """Raises: ArtifactError naming the file when it is not the one that its marker describes."""
    if found.bytes != expected.bytes:
        raise ArtifactError(f"{path} has {found.bytes} bytes, its marker says {expected.bytes}: it was cut or changed")
    if found.xxh3 != expected.xxh3:
        raise ArtifactError(f"{path} is damaged: its digest is {found.xxh3}, its marker says {expected.xxh3}")
