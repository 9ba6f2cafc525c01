"""Every error that a user can cause or must act on.

    PrimeRLError                  what went wrong, where, and what to do; shown without a traceback, exit code 1
    +-- ConfigError               a key, flag, file or combination of them           (also a ValueError)
    +-- ModelError                a model is missing, unsupported or does not fit    (also a ValueError)
    +-- DataError                 a data set, row or batch breaks its form           (also a ValueError)
    +-- ArtifactError             a file of the run is missing, half-written or fails its digest
    +-- EnvironmentSetupError     an environment cannot be found or loaded
    +-- InferenceError            the inference server cannot be reached or refuses
    +-- ProcessFailed             a process of the run ended when it should not have
    +-- DeadlineExceeded          a wait took longer than allowed                    (also a TimeoutError)

A failed rollout is none of these: it is data (`environments.rollouts`), counted and never trained on. `assert` guards
our own invariants only. To add an error: inherit the category and the standard type it replaces, and let the message
name what, where and the fix.
"""


class PrimeRLError(Exception):
    """Base of everything shown to the user as a message instead of a traceback."""


class ConfigError(PrimeRLError, ValueError):
    """A configuration value, key, file or combination is wrong; the message names the key and its source."""


class ModelError(PrimeRLError, ValueError):
    """A model directory or hub name is missing, unsupported, or its tensors do not fit."""


class DataError(PrimeRLError, ValueError):
    """A data set, row, sample or batch is not of the form that is needed; the message names file and row."""


class ArtifactError(PrimeRLError):
    """A file or directory of a run is missing, incomplete or does not match its digest."""


class EnvironmentSetupError(PrimeRLError):
    """An environment package cannot be found, loaded or used."""


class InferenceError(PrimeRLError):
    """The inference server cannot be reached, or refuses what the run needs."""


class ProcessFailed(PrimeRLError):
    """A process of the run ended when it should not have."""


class DeadlineExceeded(PrimeRLError, TimeoutError):
    """A wait across processes took longer than allowed; the message says for what and how long."""
