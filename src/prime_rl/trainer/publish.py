"""Which weights are published after a step, and which older ones nobody can need any more."""

from pathlib import Path
from typing import Protocol

import torch

from prime_rl.logs import get_logger
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import hf_tensors
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import complete_steps, remove_dir
from prime_rl.transport.weights import publish_weights

_logger = get_logger(__name__)


class Publisher(Protocol):
    """Called after every optimizer step with the number of steps done."""

    def publish(self, step: int) -> None:
        """Make the weights after `step` steps available, if they are wanted."""


def removable(steps: list[int], *, latest: int, keep_last: int, interval: int | None) -> list[int]:
    """Of the published `steps`, those outside the last `keep_last` that are no multiple of `interval`.

    Example: removable([1, 2, 3, 4, 5], latest=5, keep_last=2, interval=2) == [1, 3]
    """
    old = [step for step in steps if step <= latest - keep_last]
    return [step for step in old if interval is None or step % interval]


class WeightPublisher:
    """Writes `weights/step_N` in Hugging Face format.

    For RL (`keep_last` set) every step is published, because inference waits for it, and older ones are
    removed. For SFT (`keep_last` None) only multiples of `interval` and the last step are.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        weights_dir: Path,
        assets: Path,
        tokenizer: Path,
        dtype: torch.dtype,
        max_steps: int | None,
        interval: int | None,
        keep_last: int | None,
    ) -> None:
        self._model = model
        self._weights_dir = weights_dir
        self._assets = assets
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._max_steps = max_steps
        self._interval = interval
        self._keep_last = keep_last

    def publish(self, step: int) -> None:
        """Raises: ArtifactError when the weights cannot be written."""
        if self._keep_last is None and not self._is_milestone(step):
            return
        tensors = ((name, tensor.to(self._dtype)) for name, tensor in hf_tensors(self._model))
        directory = publish_weights(
            tensors, step=step, weights_dir=self._weights_dir, assets=self._assets, tokenizer=self._tokenizer
        )
        _logger.debug("Published %s", directory)
        if self._keep_last is not None:
            self._remove_old(step, self._keep_last)

    def _is_milestone(self, step: int) -> bool:
        return step == self._max_steps or (self._interval is not None and step % self._interval == 0)

    def _remove_old(self, latest: int, keep_last: int) -> None:
        steps = complete_steps(self._weights_dir)
        for step in removable(steps, latest=latest, keep_last=keep_last, interval=self._interval):
            remove_dir(step_dir(self._weights_dir, step))
