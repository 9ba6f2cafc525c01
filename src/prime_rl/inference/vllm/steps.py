"""Whether vLLM's engine gets on: its steps, counted by a logger of its statistics, which is vLLM's own seam for this.

The engine runs in a process of its own, so a server that answers says nothing of it. It counts as well where vLLM's own
statistics are switched off (`inference.vllm.disable_log_stats`).
"""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from prime_rl import activity


class Steps:
    """The steps of all copies of the model. vLLM makes a logger for each with this."""

    def __init__(self) -> None:
        self._num = self._num_seen = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        return _Counter(self)

    def have_come(self) -> bool:
        """Whether there was one since this was asked last."""
        before, self._num_seen = self._num_seen, self._num
        return self._num != before

    def count(self) -> None:
        """There is one more."""
        self._num += 1
        activity.beat()


class _Counter(StatLoggerBase):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **options: Any) -> None:
        """What we put into vLLM's queue ourselves (`VersionedLLM.drained`) has neither, and is no step."""
        if scheduler_stats is not None or iteration_stats is not None:
            self._steps.count()

    def log_engine_initialized(self) -> None:
        pass
