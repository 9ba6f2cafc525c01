"""A thread that writes to disk what a training loop gives it, one thing at a time.

    consumes                    waits for                   unblocked by
    the next thing, the end     the thread of the one before    that thread; HANGING_S and more, if the disk hangs

A disk that keeps up holds up nobody. One that does not is waited for in words, and not for ever.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from prime_rl import activity, lifeline
from prime_rl.errors import ArtifactError, PrimeRLError
from prime_rl.logs import get_logger

TICK_S: Final = 1.0
"""Between two calls of `while_waiting`."""
HANGING_S: Final = 600.0
SLOWEST_DISK: Final = 2**24
"""Bytes a second. A disk that takes less, and HANGING_S more, counts as one that hangs."""
WORTH_TELLING_S: Final = 1.0

_logger = get_logger(__name__)


class Job(ABC):
    """Something on its way to files, and the thread that writes it."""

    is_in_background = True
    """Whether waiting for it is worth telling."""
    is_left = False
    """Who gave it was interrupted, and its error is a consequence of that."""

    def __init__(self, name: str, *, thread: str) -> None:
        self.error: PrimeRLError | None = None
        """Why it was not written, once the thread has ended."""
        self.thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._name = name

    def __str__(self) -> str:
        return f"{self._name} ({self.num_bytes / 1e9:.2g} GB)"

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """As far as it is known yet."""

    @property
    def is_whole(self) -> bool:
        """Whether it is written to its end even where the loop is stuck."""
        return True

    @abstractmethod
    def write(self) -> None:
        """In the thread."""

    def patience(self) -> float:
        """Seconds for which the disk is waited for."""
        return HANGING_S + self.num_bytes / SLOWEST_DISK

    def _run(self) -> None:
        try:
            self.write()
        except PrimeRLError as error:  # raised by whatever the loop does next
            self.error = error
        except BaseException as error:  # a supervision point: of CUDA, of a rank that is lost, or a bug
            _logger.exception("%s was not written", self)
            self.error = ArtifactError(f"{self} was not written: {type(error).__name__}: {error}")


J = TypeVar("J", bound=Job)


class OneAtATime(Generic[J]):
    """Whoever has jobs written, each after the one before. To be closed, however training ends."""

    def __init__(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        """`while_waiting`: called every TICK_S in which something is waited for; what it raises ends the waiting."""
        self._while_waiting = while_waiting
        self._job: J | None = None
        lifeline.unfinished.append(self._is_writing)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._job is not None and self._job.thread.is_alive()

    def check(self) -> None:
        """Raises: the error of what could not be written, once. Waits for nothing."""
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
        if job.is_in_background and waiting.seconds > WORTH_TELLING_S:
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
        job = self._job
        return job is not None and job.is_whole and job.thread.is_alive()

    def _tick(self, job: J, waited: float) -> None:
        self._while_waiting()
        if waited > job.patience():
            self._job = None  # it is waited for no more
            raise ArtifactError(f"{job} was not written within {waited:.0f} s: its disk hangs, or is too slow for it")
