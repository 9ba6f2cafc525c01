"""Which weights are published after a step, how, and which older ones nobody can need any more."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torch

from prime_rl.errors import DeadlineExceeded, InferenceError
from prime_rl.logs import get_logger
from prime_rl.models.hf import MAX_SHARD_BYTES
from prime_rl.paths import step_dir
from prime_rl.trainer.model import TrainedModel
from prime_rl.transport import broadcasts
from prime_rl.transport.checksum import entries
from prime_rl.transport.manifest import complete_steps, remove_dir
from prime_rl.transport.nccl import Sender
from prime_rl.transport.weights import publish_weights, published

_SHARD_BYTES: Final = 2**28  # of what is soon removed again: several are written, and read, at the same time

_logger = get_logger(__name__)


class Publisher(Protocol):
    """Called after every optimizer step with the number of steps done."""

    def publish(self, step: int) -> None:
        """Make the weights after `step` steps available, if they are wanted."""

    def idle(self) -> None:
        """Called a few times a second while the trainer waits for a batch; the weights are those published last."""


def removable(steps: list[int], *, latest: int, keep_last: int, interval: int | None) -> list[int]:
    """Of the published `steps`, those outside the last `keep_last` that are no multiple of `interval`.

    Example: removable([1, 2, 3, 4, 5], latest=5, keep_last=2, interval=2) == [1, 3]
    """
    old = [step for step in steps if step <= latest - keep_last]
    return [step for step in old if interval is None or step % interval]


class WeightPublisher:
    """Writes `weights/step_N` in Hugging Face format.

    For RL (`keep_last` set) every step is published, because inference waits for it, and older ones are
    removed. For SFT (`keep_last` None) only multiples of `interval` and the last step are. What stays is forced to
    disk; what is removed again after a few steps is not.
    """

    def __init__(
        self,
        *,
        model: TrainedModel,
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
        stays = self.is_milestone(step)
        if self._keep_last is None and not stays:
            return
        tensors = ((name, tensor.to(self._dtype)) for name, tensor in self._model.stored().items())
        directory = publish_weights(
            tensors,
            step=step,
            weights_dir=self._weights_dir,
            assets=self._assets,
            tokenizer=self._tokenizer,
            max_shard_bytes=MAX_SHARD_BYTES if stays else _SHARD_BYTES,
            durable=stays,
        )
        _logger.debug("Published %s", directory)
        if self._keep_last is not None:
            self._remove_old(step, self._keep_last)

    def idle(self) -> None:
        """Nothing is left to do."""

    def is_milestone(self, step: int) -> bool:
        """Whether the weights of this step are to stay on disk."""
        return step == self._max_steps or (self._interval is not None and step % self._interval == 0)

    def _remove_old(self, latest: int, keep_last: int) -> None:
        steps = complete_steps(self._weights_dir)
        for step in removable(steps, latest=latest, keep_last=keep_last, interval=self._interval):
            remove_dir(step_dir(self._weights_dir, step))


class BroadcastPublisher:
    """Sends weights from GPU to GPU, and leaves to `files` the steps that stay on disk, and all once NCCL is given up.

    consumes     waits for                             unblocked by
    weights n    its group, at the first step          the servers' /init_weight_transfer
    weights n    broadcasts/ready_n                    the orchestrator, once all servers are paused
    weights n    the servers to receive                their /update_weights

    Weights that were only sent become files as soon as NCCL is given up: a server that was started again takes them.
    """

    def __init__(
        self,
        *,
        model: TrainedModel,
        dtype: torch.dtype,
        sender: Sender,
        root: Path,
        timeout: float,
        files: WeightPublisher,
    ) -> None:
        """`root`: `broadcasts` of the run. `timeout`: seconds to wait for the orchestrator."""
        self._model = model
        self._dtype = dtype
        self._sender = sender
        self._root = root
        self._timeout = timeout
        self._files = files
        self._has_left = False
        self._sent: int | None = None
        """The step published last, where it was sent and is in no file."""

    def publish(self, step: int) -> None:
        """Raises: DeadlineExceeded when the orchestrator does not react, ArtifactError when the disk refuses."""
        is_sent = not self._files.is_milestone(step) and self._is_connected() and self._is_sent(step)
        self._sent = step if is_sent else None
        if not is_sent:
            self._leave_if_given_up(step)
            self._files.publish(step)

    def idle(self) -> None:
        """Raises: ArtifactError when the disk refuses."""
        if not self._is_over():
            self._trying(self._sender.check)
        if self._sent is not None and broadcasts.fallback_reason(self._root) is not None:
            step, self._sent = self._sent, None
            self._leave_if_given_up(step)
            self._files.publish(step)

    def _is_connected(self) -> bool:
        return not self._is_over() and self._trying(lambda: self._sender.open(self._is_over))

    def _is_sent(self, step: int) -> bool:
        tensors = {name: tensor.to(self._dtype) for name, tensor in self._model.stored().items()}
        broadcasts.announce(self._root, step, published("nccl", entries(tensors)))
        is_ready = broadcasts.wait_until_ready(self._root, step, timeout=self._timeout)
        return self._trying(lambda: self._sender.send(tensors, self._is_over)) if is_ready else False

    def _trying(self, call: Callable[[], None]) -> bool:
        """Whether the call succeeded and NCCL is still in use."""
        try:
            call()
        except (InferenceError, DeadlineExceeded) as error:
            _logger.warning("Weights cannot be sent over NCCL: %s", error)
            broadcasts.fall_back(self._root, str(error))
        return not self._is_over()

    def _leave_if_given_up(self, step: int) -> None:
        reason = broadcasts.fallback_reason(self._root)
        if reason is not None and not self._has_left:
            self._has_left = True
            _logger.info("Weights are files from step %d on, not sent over NCCL: %s", step, reason)
            self._sender.close()

    def _is_over(self) -> bool:
        return broadcasts.is_over(self._root)
