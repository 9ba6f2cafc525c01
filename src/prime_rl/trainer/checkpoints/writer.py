"""Writes one checkpoint at a time: a thread on each rank, and all of them into one directory.

    loop (all ranks)   save: Copy begins | next step ...           | next save, or the end: waits for the threads
    thread, rank 0     copies | draft directory, tells its name | slices | the rest, marker, rename, tells | older ones
    thread, others     copies | hears it                        | slices | hears it

consumes               waits for                               unblocked by
next save, the end     the thread of the one before            that thread (`trainer.writing`)
thread                 the ranks' threads                      `Ranks.saving`, a group that nobody else talks over
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from prime_rl import activity
from prime_rl.disk import refused
from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger
from prime_rl.trainer.checkpoints.copies import Copy, HostBuffers, num_bytes
from prime_rl.trainer.ckpt import Record, State, save_state, write_record
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.writing import Job, OneAtATime
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE, TRAINER_STATE
from prime_rl.transport.manifest import publish_dir

_logger = get_logger(__name__)

_DONE = ""
"""What rank 0 tells the others when all is well; else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What goes into a checkpoint besides the tensors; asked for and called on rank 0, but for `final`."""

    final: Path
    """`<root>/step_N`."""
    record: Record
    orchestrator: Callable[[], bytes | None]
    """The orchestrator's state, if there is one."""
    begun: Callable[[], None]
    """Called before anything is written."""
    complete: Callable[[], None]
    """Called once the checkpoint is there."""
    replaces: bool = False
    """Whether it takes the place of one of the same step, if there is one."""


class CheckpointWriter(OneAtATime["_Job"]):
    """Has one checkpoint written at a time."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._buffers = HostBuffers()

    def prepare(self, state: State) -> None:
        """Have the memory for copies of a GPU's `state` before the first of them."""
        if self._ranks.device.type == "cuda":
            self._buffers.prepare(state)

    def save(self, state: State, contents: Contents, *, in_background: bool) -> None:
        """Write a checkpoint, after the one before. All ranks at once.

        `in_background`: this is back at once, and weights change only after `wait_copied`.
        Raises: ArtifactError where this one, or the one before, cannot be written.
        """
        self.finish()
        copy = Copy(state, self._buffers) if in_background else None
        self._job = _Job(copy or state, contents, self._ranks)
        self._job.thread.start()
        if not in_background:
            self.finish()

    def wait_copied(self) -> None:
        """Called before weights change: what is being saved is copied first."""
        if self._job is not None and isinstance(self._job.source, Copy):
            self._job.source.wait_copied()

    def close(self) -> None:
        super().close()
        if not self.is_busy:
            self._buffers.close()


class _Job(Job):
    """A state on its way to files."""

    def __init__(self, source: Copy | State, contents: Contents, ranks: Ranks) -> None:
        super().__init__(str(contents.final), thread="checkpoint")
        self.is_in_background = isinstance(source, Copy)
        self.source = source
        self._num_bytes = 0
        self._contents = contents
        self._ranks = ranks

    @property
    def num_bytes(self) -> int:
        return self._num_bytes  # once it is copied

    def write(self) -> None:
        start, final = time.perf_counter(), self._contents.final
        task = activity.doing(f"writing {final.parent.name}/{final.name}").begin()
        try:
            state = self.source.make() if isinstance(self.source, Copy) else self.source
            self._num_bytes = num_bytes(state)
            if self._ranks.is_leader:
                self._lead(state)
                _logger.info("Checkpoint %s is complete, %.1f s after its step", self, time.perf_counter() - start)
            else:
                self._follow(state)
        except OSError as error:
            raise refused(error, final) from error
        finally:
            task.end()

    def _lead(self, state: State) -> None:
        contents = self._contents
        contents.begun()
        try:
            with publish_dir(contents.final, replaces=contents.replaces) as draft:
                self._tell(str(draft))
                save_state(draft / TRAINER_STATE, state, self._ranks.saving)
                write_record(draft / TRAINER_STATE, contents.record)
                if (orchestrator := contents.orchestrator()) is not None:
                    path = draft / ORCHESTRATOR_STATE
                    path.parent.mkdir()
                    path.write_bytes(orchestrator)
        except BaseException as error:
            with suppress(RuntimeError):  # they may be gone, which is no news then
                self._tell(f"{error}\n")
            raise
        with suppress(RuntimeError):
            self._tell(_DONE)
        contents.complete()

    def _follow(self, state: State) -> None:
        word = self._hear()
        if not word.endswith("\n"):
            save_state(Path(word) / TRAINER_STATE, state, self._ranks.saving)
            word = self._hear()
        if word != _DONE:
            raise ArtifactError(word.rstrip("\n"))

    def _tell(self, word: str) -> None:
        if self._ranks.saving is not None:
            dist.broadcast_object_list([word], src=0, group=self._ranks.saving)

    def _hear(self) -> str:
        words: list[Any] = [None]
        dist.broadcast_object_list(words, src=0, group=self._ranks.saving)
        return str(words[0])
