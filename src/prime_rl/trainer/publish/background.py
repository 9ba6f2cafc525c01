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

from prime_rl import activity, lifeline
from prime_rl.errors import ArtifactError, PrimeRLError
from prime_rl.logs import get_logger
from prime_rl.trainer.publish.staging import Lot, Named, lots
from prime_rl.transport.checksum import Tally

SNAPSHOT_BYTES: Final = 2**33
"""What a snapshot holds before the loop waits for the writer: all of a model of 4 billion bfloat16 parameters, and
little beside the memory of a host with a GPU. Shards that are being written come on top (`models.hf`): 5 GiB at most. A
tensor of more than GROUP_BYTES takes up to twice its size, for torch rounds pinned memory up to powers of two."""

TICK_S: Final = 1.0
"""Between two calls of `while_waiting`."""
HANGING_S: Final = 600.0
SLOWEST_DISK: Final = 2**24
"""Bytes a second. A disk that takes less, and HANGING_S more, counts as one that hangs."""
WORTH_TELLING_S: Final = 1.0

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
                lambda: self._is_dropped or not self._lots or self._held_bytes + num_bytes <= self._limit_bytes, TICK_S
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


class _Job:
    """Tensors on their way to files, and the thread that writes them."""

    def __init__(self, name: str, snapshot: Snapshot, write: Callable[[Snapshot], object]) -> None:
        self.snapshot = snapshot
        self.is_left = False
        """It was interrupted while it was copied, and the thread stops: its error is a consequence of that."""
        self.error: PrimeRLError | None = None
        """Why it was not written, once the thread has ended."""
        self.thread = threading.Thread(target=self._run, args=(write,), name="weights", daemon=True)
        self._name = name

    def __str__(self) -> str:
        return f"{self._name} ({self.snapshot.num_bytes / 1e9:.2g} GB)"

    def patience(self) -> float:
        """Seconds for which the disk is waited for."""
        return HANGING_S + self.snapshot.num_bytes / SLOWEST_DISK

    def _run(self, write: Callable[[Snapshot], object]) -> None:
        start = time.perf_counter()
        try:
            with activity.doing(f"writing {Path(self._name).name}"):
                write(self.snapshot)
            _logger.debug("Published %s in %.2f s", self, time.perf_counter() - start)
        except PrimeRLError as error:  # raised by whatever the loop does next
            self.error = error
        except BaseException as error:  # a supervision point: of CUDA, or a bug
            _logger.exception("%s was not written", self)
            self.error = ArtifactError(f"{self} was not written: {type(error).__name__}: {error}")
        finally:
            self.snapshot.drop()  # so that nobody goes on filling it, should it be left


class BackgroundWriter:
    """A thread that writes one lot of tensors at a time. To be closed, however training ends."""

    def __init__(self, limit_bytes: int = SNAPSHOT_BYTES, while_waiting: Callable[[], object] = lambda: None) -> None:
        """`limit_bytes`: see Snapshot. `while_waiting`: called every TICK_S in which `start` or `finish` waits."""
        self._limit_bytes = limit_bytes
        self._while_waiting = while_waiting
        self._job: _Job | None = None
        lifeline.unfinished.append(self._is_writing)

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

    def check(self) -> None:
        """Raises: the error of a lot that could not be written, once. Waits for nothing."""
        if self._job is not None and not self._job.thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until everything is written. Raises: as `check`, and ArtifactError where the disk seems to hang."""
        job = self._job
        if job is None:
            return
        with activity.waiting(activity.DISK, lambda: f"it to take {job}", deadline_s=job.patience()) as waiting:
            while job.thread.is_alive():
                job.thread.join(TICK_S)
                if job.thread.is_alive():
                    self._tick(job, waiting.seconds)
        if waiting.seconds > WORTH_TELLING_S:
            _logger.info("Waited %.1f s for the disk to take %s", waiting.seconds, job)
        self._job = None
        if job.error is not None and not job.is_left:
            raise job.error

    def close(self) -> None:
        """Wait for what was copied whole to be written; of the rest nothing stays. Errors are logged, not raised."""
        self._while_waiting = lambda: None  # nobody listens any more
        if (job := self._job) is not None and job.thread.is_alive():
            _logger.info("Waiting for %s to be written, %.0f s at most", job, job.patience())
        try:
            self.finish()
        except PrimeRLError as error:
            _logger.error("%s", error)
        finally:
            lifeline.unfinished.remove(self._is_writing)

    def _is_writing(self) -> bool:
        """Whether there is something that was copied whole: it is written even where the loop is stuck."""
        job = self._job
        return job is not None and job.snapshot.is_filled and job.thread.is_alive()

    def _tick(self, job: _Job, waited: float) -> None:
        self._while_waiting()
        if waited > job.patience():
            self._job = None  # it is waited for no more
            raise ArtifactError(f"{job} was not written within {waited:.0f} s: its disk hangs, or is too slow for it")
