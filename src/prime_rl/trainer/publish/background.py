"""Weights on their way to files while training goes on: copied as they are now, written by a thread.

    training loop    tensors -> copies in the host's memory --Snapshot--> writer thread: files, marker, rename

    loop             waits for                                  unblocked by
    training         the lot before to be written               the writer thread
    training         room in the snapshot (`limit_bytes`)       the writer thread, as it takes tensors
    writer           the next tensor, the GPU's copy of it      the training loop, the GPU

Neither the loop nor the GPU (`staging`) waits for a disk that keeps up. One that does not is waited for in words, and
not for ever.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from torch import Tensor

from prime_rl import activity
from prime_rl.errors import ArtifactError
from prime_rl.logs import get_logger
from prime_rl.trainer import writing
from prime_rl.trainer.publish.staging import Lot, Named, lots
from prime_rl.trainer.writing import Job, OneAtATime
from prime_rl.transport.checksum import Tally

SNAPSHOT_BYTES: Final = 2**33
"""What a snapshot holds before the loop waits for the writer: all of a model of 4 billion bfloat16 parameters, and
little beside the memory of a host with a GPU. Shards that are being written come on top (`models.hf`): 5 GiB at most. A
tensor of more than GROUP_BYTES takes up to twice its size, for torch rounds pinned memory up to powers of two."""

_logger = get_logger(__name__)


Waiting = Callable[[float], None]
"""Called with the seconds for which something has been waited for."""


class Snapshot:
    """Named tensors as they were at one moment, filled by one thread and iterated, once, by another."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: held at most between the two, but for a single larger lot."""
        self.tally = Tally()
        """Checksums of what has been iterated so far. Those of a GPU's tensors are the GPU's, of the packed copies that
        went to the host: they prove that way, not the packing before it."""
        self.num_bytes = 0
        """Copied so far."""
        self._limit_bytes = limit_bytes
        self._lots: deque[Lot] = deque()
        self._held_bytes = 0
        self._changed = threading.Condition()
        self.is_filled = self._is_dropped = False

    def fill(self, tensors: Iterable[Named], while_waiting: Waiting) -> bool:
        """Copy `tensors`, while the other thread takes them. False where that one has given up.

        Those on the CPU are taken as they are: nobody may change them any more. `while_waiting` is called every TICK_S
        in which there is no room; what it raises ends the waiting.
        """
        with closing(lots(tensors)) as copied:
            for lot in copied:
                start = activity.clock()
                while not self._has_room(lot.num_bytes):
                    while_waiting(activity.clock() - start)
                with self._changed:
                    if self._is_dropped:
                        return False
                    self._lots.append(lot)
                    self._held_bytes += lot.num_bytes
                    self.num_bytes += lot.num_bytes
                    self._changed.notify()
        with self._changed:
            self.is_filled = True
            self._changed.notify()
        return True

    def drop(self) -> None:
        """Give up, in either thread: the other one stops as well."""
        with self._changed:
            self._is_dropped = True
            self._lots.clear()
            self._changed.notify()

    def __iter__(self) -> Iterator[Named]:
        """Raises: ArtifactError once the thread that fills it has given up."""
        while (lot := self._taken()) is not None:
            if lot.arrived is not None:
                lot.arrived.synchronize()
            totals = [None] * len(lot.names) if lot.totals is None else lot.totals.unbind()
            for name, tensor, total in zip(lot.names, lot.tensors, totals, strict=True):
                self.tally.add(name, tensor, total)
                yield name, tensor

    def _has_room(self, num_bytes: int) -> bool:
        """Whether there is room, or nobody needs it any more, within TICK_S."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_dropped or not self._lots or self._held_bytes + num_bytes <= self._limit_bytes,
                writing.TICK_S,
            )

    def _taken(self) -> Lot | None:
        """The next one; None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._lots or self.is_filled or self._is_dropped)
            if self._is_dropped:
                raise ArtifactError("training ended before all weights were copied")
            if not self._lots:
                return None
            lot = self._lots.popleft()
            self._held_bytes -= lot.num_bytes
            self._changed.notify()
            return lot


class _Job(Job):
    """Tensors on their way to files."""

    def __init__(self, name: str, snapshot: Snapshot, write: Callable[[Snapshot], object]) -> None:
        super().__init__(name, thread="weights")
        self.snapshot = snapshot
        self._write = write

    @property
    def num_bytes(self) -> int:
        return self.snapshot.num_bytes

    @property
    def is_whole(self) -> bool:
        return self.snapshot.is_filled

    def write(self) -> None:
        start = time.perf_counter()
        try:
            with activity.doing(f"writing {Path(self._name).name}"):
                self._write(self.snapshot)
            _logger.debug("Published %s in %.2f s", self, time.perf_counter() - start)
        finally:
            self.snapshot.drop()  # so that nobody goes on filling it, should it be left


class BackgroundWriter(OneAtATime[_Job]):
    """A thread that writes one lot of tensors at a time."""

    def __init__(self, limit_bytes: int = SNAPSHOT_BYTES, while_waiting: Callable[[], object] = lambda: None) -> None:
        """`limit_bytes`: see Snapshot. `while_waiting`: called every TICK_S in which `start` or `finish` waits."""
        super().__init__(while_waiting)
        self._limit_bytes = limit_bytes

    def start(self, name: str, tensors: Iterable[tuple[str, Tensor]], write: Callable[[Snapshot], object]) -> None:
        """Copy `tensors` and have them written by `write`, in the thread; the lot before is waited for.

        When this is back nothing is asked of `tensors` any more; what comes from a GPU may be changed there.
        Raises: the error of the lot before, or of this one where it comes meanwhile; ArtifactError as `finish`.
        """
        self.finish()
        job = self._job = _Job(name, Snapshot(self._limit_bytes), write)
        try:
            job.thread.start()
            is_filled = job.snapshot.fill(tensors, lambda waited: self._tick(job, waited))
        except BaseException:  # an interruption, too: the thread would wait for the rest for ever
            job.snapshot.drop()
            job.is_left = True
            raise
        if not is_filled:
            self.finish()
