"""Every error that a user can cause or must act on.

    PrimeRLError                  what went wrong, where, and what to do; shown without a traceback, exit code 1
    +-- ConfigError               a key, flag, file or combination of them           (also a ValueError)
    +-- ModelError                a model is missing, unsupported or does not fit    (also a ValueError)
    +-- DataError                 a data set, row or batch breaks its form           (also a ValueError)
    +-- ArtifactError             a file of the run is missing, half-written or fails its digest
    |   +-- DiskError             the disk does not take what the run cannot do without
    |   +-- Unreadable            a file cannot be read now, which says nothing about what is in it
    +-- EnvironmentSetupError     an environment cannot be found or loaded
    +-- InferenceError            the inference server cannot be reached or refuses
    |   +-- NoServer              and nobody starts it again
    +-- ProcessFailed             a process of the run ended when it should not have
    +-- MemoryFull                the memory of a GPU does not suffice
    +-- Hopeless                  what was generated is not worth training on, and would not be again
    +-- NotFinite                 loss, gradient or weights hold NaN or infinity
    +-- DeadlineExceeded          a wait took longer than allowed                    (also a TimeoutError)

Those that a restart of the process does not mend are `is_final`; a process that `rl` started ends with FINAL then.

A failed rollout is none of these: it is data (`environments.rollouts`), counted and never trained on. `assert` guards
our own invariants only. To add an error: inherit the category and the standard type it replaces, and let the message
name what, where and the fix.
"""

from typing import Final

FINAL: Final = 3
"""Exit code of a process that `rl` started and that ended with an error which is final."""


class PrimeRLError(Exception):
    """Base of everything shown to the user as a message instead of a traceback."""

    is_final: bool = False
    """Whether the process would end in the same way if it was started again, so that nobody need try."""


class ConfigError(PrimeRLError, ValueError):
    """A configuration value, key, file or combination is wrong; the message names the key and its source."""

    is_final = True


class ModelError(PrimeRLError, ValueError):
    """A model directory or hub name is missing, unsupported, or its tensors do not fit."""

    is_final = True


class DataError(PrimeRLError, ValueError):
    """A data set, row, sample or batch is not of the form that is needed; the message names file and row."""

    is_final = True


class ArtifactError(PrimeRLError):
    """A file or directory of a run is missing, incomplete or does not match its digest."""


class DiskError(ArtifactError):
    """The disk does not take what the run cannot do without: it is full, read-only or broken, or files ran out."""

    is_final = True


class Unreadable(ArtifactError):
    """A file cannot be read now: files ran out, or a disk or server refuses. It may be sound, so nobody passes it over
    or removes it; a restart may find it readable again."""


class EnvironmentSetupError(PrimeRLError):
    """An environment package cannot be found, loaded or used."""

    is_final = True


class InferenceError(PrimeRLError):
    """The inference server cannot be reached, or refuses what the run needs."""


class NoServer(InferenceError):
    """A server that `rl` did not start is not there, or is another one: starting its clients again brings it nearer to
    nobody, and costs their patience each time."""

    is_final = True


class ProcessFailed(PrimeRLError):
    """A process of the run ended when it should not have."""


class MemoryFull(PrimeRLError):
    """The memory of a GPU does not suffice; who raises it knows whether it would after a restart."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class Hopeless(PrimeRLError):
    """Rollouts that fail, or give nothing to train on, too often to go on: a verdict on environments and settings."""

    is_final = True


class NotFinite(PrimeRLError):
    """The loss, the gradient or the weights hold NaN or infinity, and training stopped."""

    is_final = True


class DeadlineExceeded(PrimeRLError, TimeoutError):
    """A wait across processes took longer than allowed; the message says for what and how long."""
