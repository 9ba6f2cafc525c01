"""Training batches from the orchestrator to the trainer through the filesystem. Both ends; no torch.

`<root>/step_N/batch.msgpack` holds one TrainingBatch, beside the marker of `transport.manifest`. An array
travels as [dtype, shape, raw bytes], little-endian. `state.msgpack` beside it is the orchestrator's own state right
after it took the batch (`orchestrator.state`); nobody else looks into it, the trainer copies it into its checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from prime_rl import activity
from prime_rl.data.samples import TrainingBatch
from prime_rl.errors import ArtifactError, DataError, DeadlineExceeded
from prime_rl.logs import get_logger
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import MARKER, STEP_NAME, publish_dir, read_manifest, read_verified

_FILE: Final = "batch.msgpack"
STATE: Final = "state.msgpack"
_REMOVED: Final = (MARKER, STATE, _FILE)
"""Of a batch that nobody needs, in this order."""
_DTYPES: Final = ("<i4", "<f4", "|b1")
_NOTICE_INTERVAL_S: Final = 30.0

_logger = get_logger(__name__)


class BatchWriter:
    """The orchestrator's end. One writer per root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, batch: TrainingBatch, beside: Mapping[str, bytes] | None = None) -> Path:
        """Publish the batch and return its directory; `beside` are further files of it, by name.

        Raises: ArtifactError when that step exists already.
        """
        final = step_dir(self._root, batch.step)
        with publish_dir(final) as directory:
            (directory / _FILE).write_bytes(encode(batch))
            for name, content in (beside or {}).items():
                (directory / name).write_bytes(content)
        return final


class BatchReader:
    """The trainer's end."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def directory(self, step: int) -> Path:
        """Where batch `step` is, or will be."""
        return step_dir(self._root, step)

    def wait(self, step: int, timeout: float, poll: float = 0.05, idle: Callable[[], None] | None = None) -> None:
        """Block until batch `step` is published; `timeout` and `poll` are seconds.

        `idle` is called before every pause. Raises: DeadlineExceeded saying what it waited for.
        """
        self._wait(activity.waiting("orchestrator", f"batch {step}", deadline_s=timeout), step, poll, idle)

    def _wait(self, waiting: activity.Waiting, step: int, poll: float, idle: Callable[[], None] | None) -> None:
        next_notice_s = _NOTICE_INTERVAL_S
        with waiting:
            while not (self.directory(step) / MARKER).exists():
                if waiting.is_overdue:
                    raise DeadlineExceeded(
                        f"no batch for step {step} appeared in {self._root} within {waiting.patience_s:g} s; "
                        "look at the orchestrator's log, or raise batch_timeout"
                    )
                if waiting.seconds >= next_notice_s:
                    _logger.info("Waiting for batch %d in %s since %.0f s", step, self._root, waiting.seconds)
                    next_notice_s += _NOTICE_INTERVAL_S
                if idle is not None:
                    idle()
                time.sleep(poll)

    def read(self, step: int, timeout: float, poll: float = 0.05) -> TrainingBatch:
        """Batch `step`, once it is published.

        Raises: as `wait`; ArtifactError naming a damaged file.
        """
        self._wait(activity.waiting(activity.DISK, f"batch {step}", deadline_s=timeout), step, poll, None)
        directory = self.directory(step)
        path = directory / _FILE
        try:
            batch = decode(read_verified(directory, _FILE))
        except (msgspec.MsgspecError, DataError) as error:
            raise ArtifactError(f"{path} does not hold a valid batch: {error}") from error
        if batch.step != step:
            raise ArtifactError(f"{path} holds batch {batch.step}, not batch {step}")
        return batch


def read_state(directory: Path) -> bytes | None:
    """The orchestrator's state beside the batch in `directory`; None where it was written without.

    Raises: ArtifactError when the directory is not complete, or the file damaged.
    """
    return read_verified(directory, STATE) if STATE in read_manifest(directory).files else None


def recorded_steps(root: Path) -> list[int]:
    """Steps of which `root` holds a batch or what one that was killed in `remove_batch` has left, ascending."""
    matches = (STEP_NAME.fullmatch(path.name) for path in root.glob("step_*"))
    steps = sorted(int(match[1]) for match in matches if match)
    return [step for step in steps if any((step_dir(root, step) / name).exists() for name in _REMOVED)]


def remove_batch(directory: Path) -> None:
    """Remove a recorded batch and the state beside it, which nobody needs any more; its readable rollouts stay.

    The marker goes first, so that nobody takes what is left for a batch. Where the disk refuses, a warning says so.
    """
    try:
        for name in _REMOVED:
            (directory / name).unlink(missing_ok=True)
        if not any(directory.iterdir()):
            directory.rmdir()
    except OSError as error:
        _logger.warning("The batch in %s cannot be removed: %s", directory, error)


def digest_of(batch: TrainingBatch) -> str:
    """What identifies a batch wherever it is: the digest (XXH3-128, hex) that its file has in the marker."""
    return xxhash.xxh3_128_hexdigest(encode(batch))


def encode(batch: TrainingBatch) -> bytes:
    return msgspec.msgpack.encode(batch, enc_hook=encode_array)


def decode(content: bytes) -> TrainingBatch:
    """Raises: msgspec.MsgspecError for bytes of another shape, DataError for a broken invariant."""
    return msgspec.msgpack.decode(content, type=TrainingBatch, dec_hook=decode_array)


def encode_array(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """A numpy array as it travels: the `enc_hook` of msgspec for structs that hold arrays."""
    assert isinstance(value, np.ndarray), f"cannot send a {type(value).__name__}"
    array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    assert array.dtype.str in _DTYPES, f"cannot send an array of {array.dtype}"
    return array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data


def decode_array(_type: type, value: Any) -> np.ndarray:
    """The `dec_hook` that belongs to `encode_array`. Raises: ValueError for another dtype."""
    dtype, shape, content = value
    if dtype not in _DTYPES:
        raise ValueError(f"array of dtype {dtype!r}, expected one of {_DTYPES}")
    # A copy: frombuffer would give a read-only view that keeps the whole file alive.
    return np.frombuffer(content, dtype=dtype).reshape(shape).copy()
