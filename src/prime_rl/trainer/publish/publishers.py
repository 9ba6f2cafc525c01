"""How weights are published after a step; which of them, and which older ones go, says `retention`."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

from torch import Tensor

from prime_rl.errors import DeadlineExceeded, InferenceError
from prime_rl.journal import Journal
from prime_rl.logs import get_logger
from prime_rl.models.lora import AdapterConfig, Factors, adapter_tensors, merge
from prime_rl.paths import step_dir
from prime_rl.trainer.model.adapters import HEAD
from prime_rl.trainer.publish.background import BackgroundWriter, Snapshot
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.retention import Retention, tell_difference
from prime_rl.transport import broadcasts
from prime_rl.transport.checksum import Tally, combined, entries
from prime_rl.transport.manifest import read_manifest
from prime_rl.transport.nccl import Sender
from prime_rl.transport.weights import publish_adapter, publish_weights, published

_logger = get_logger(__name__)


class Publisher(Protocol):
    """What the trainer calls after every optimizer step, with the number of steps done."""

    def publish(self, step: int) -> None:
        """Make the weights after `step` steps, as they are now, available, if they are wanted. All ranks at once.

        When it is back the weights may be changed; files may still be written.
        """

    def idle(self) -> bool:
        """Called on rank 0, a few times a second while it waits for a batch: whether all ranks must `catch_up`.

        Raises: ArtifactError where weights could not be written since.
        """

    def catch_up(self) -> None:
        """Publish once more what was published last, as it must be now. All ranks at once."""

    def publish_again(self, step: int) -> None:
        """Publish the weights that a run goes on with, as files, where these are not there. All ranks at once."""

    def finish(self) -> None:
        """Wait until all that was published is there. All ranks at once, after the last step."""


class Leading:
    """Rank 0 of several: publishes, and lets the others go on when it is done."""

    def __init__(self, publisher: Publisher, stored: StoredTensors) -> None:
        self._publisher = publisher
        self._stored = stored

    def publish(self, step: int) -> None:
        self._publisher.publish(step)
        self._stored.end()

    def publish_again(self, step: int) -> None:
        self._publisher.publish_again(step)
        self._stored.end()

    def idle(self) -> bool:
        return self._publisher.idle()

    def catch_up(self) -> None:
        self._publisher.catch_up()
        self._stored.end()

    def finish(self) -> None:
        self._publisher.finish()
        self._stored.end()


class Following:
    """Any other rank: gives its parts of what rank 0 publishes."""

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored

    def publish(self, step: int) -> None:
        self._stored.follow()

    def publish_again(self, step: int) -> None:
        self._stored.follow()

    def idle(self) -> bool:
        raise AssertionError("only rank 0 waits for batches")

    def catch_up(self) -> None:
        self._stored.follow()

    def finish(self) -> None:
        self._stored.follow()


class WeightPublisher:
    """Writes `step_N` in Hugging Face format, in the background, one step at a time.

    What stays is forced to disk; what is soon removed again is not.
    """

    def __init__(
        self,
        *,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        writer: BackgroundWriter,
        retention: Retention,
        assets: Path,
        tokenizer: Path,
        num_layers: int | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`tensors`: all of the model as it is now, whole, one after the other, those on the CPU as copies.

        See `publish_weights` for the rest.
        """
        self._tensors = tensors
        self._writer = writer
        self._retention = retention
        self._assets = assets
        self._tokenizer = tokenizer
        self._num_layers = num_layers
        self._journal = journal

    def publish(self, step: int) -> None:
        """Raises: ArtifactError when these weights, or those before, cannot be written."""
        if not self._retention.is_wanted(step):
            return
        if self._retention.is_published(step):
            self.compare(step)
            return
        self.note("weights_begun", step)
        name = str(step_dir(self._retention.root, step))
        self._writer.start(name, self._tensors(), lambda snapshot: self._write(step, snapshot))

    def publish_again(self, step: int) -> None:
        """Raises: as `publish`."""
        if not self._retention.is_there(step) and self._retention.is_wanted(step):
            name = str(step_dir(self._retention.root, step))
            self._writer.start(name, self._tensors(), lambda snapshot: self._write(step, snapshot))

    def note(self, event: str, step: int, **facts: str) -> None:
        """In the journal, if there is one."""
        if self._journal is not None:
            self._journal.note(event, step=step, **facts)

    def compare(self, step: int) -> None:
        """Warn where the weights of a step that was trained again are not those that were published before."""
        if self._retention.is_there(step):
            tally = Tally()
            for name, tensor in self._tensors():
                tally.add(name, tensor)
            tell_difference(self._retention.root, step, combined(tally.entries()))

    @property
    def retention(self) -> Retention:
        """Which steps stay."""
        return self._retention

    def idle(self) -> bool:
        self._writer.check()
        return False

    def catch_up(self) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        """Raises: ArtifactError when the weights published last cannot be written."""
        self._writer.finish()

    def _write(self, step: int, snapshot: Snapshot) -> None:
        """In the writer's thread."""
        directory = publish_weights(
            snapshot,
            step=step,
            weights_dir=self._retention.root,
            assets=self._assets,
            tokenizer=self._tokenizer,
            num_layers=self._num_layers,
            durable=self._retention.stays(step),
            tally=snapshot.tally,
        )
        _note_published(self._journal, step, directory)
        self._retention.remove_old(step)


class AdapterPublisher:
    """Writes `step_N` as a PEFT adapter; and, where it stays and `merged` is given, the merged model.

    Adapters are small: they are there when `publish` is back. The merged model comes in the background.
    """

    def __init__(
        self,
        *,
        stored: StoredTensors,
        config: AdapterConfig,
        base_model: str,
        tied_embedding: str,
        retention: Retention,
        merged: WeightPublisher | None,
        journal: Journal | None = None,
    ) -> None:
        """`tied_embedding`: see `trainer.model.adapters`."""
        self._journal = journal
        self._stored = stored
        self._config = config
        self._base_model = base_model
        self._tied_embedding = tied_embedding
        self._retention = retention
        self._merged = merged

    def publish(self, step: int) -> None:
        """Raises: ArtifactError when the adapter cannot be written, or a merged model before."""
        if not self._retention.is_wanted(step):
            return
        if not self._retention.is_published(step):
            if self._journal is not None:
                self._journal.note("weights_begun", step=step)
            self._write(step, *self._gathered())
        elif self._retention.is_there(step):
            tell_difference(self._retention.root, step, combined(entries(adapter_tensors(*self._gathered()))))
        if self._merged is not None and self._merged.retention.stays(step):
            self._merged.publish(step)
        self._retention.remove_old(step)

    def publish_again(self, step: int) -> None:
        """Raises: as `publish`."""
        if self._retention.is_wanted(step) and not self._retention.is_there(step):
            self._write(step, *self._gathered())
        if self._merged is not None and self._merged.retention.stays(step):
            self._merged.publish_again(step)

    def _gathered(self) -> tuple[Factors, dict[str, Tensor]]:
        factors, saved = gather_adapter(self._stored, self._config)
        if HEAD in self._config.modules_to_save and self._tied_embedding:
            saved[f"{HEAD}.weight"] = saved[self._tied_embedding]
        return factors, saved

    def _write(self, step: int, factors: Factors, saved: dict[str, Tensor]) -> None:
        directory = publish_adapter(
            self._config,
            factors,
            step=step,
            weights_dir=self._retention.root,
            base_model=self._base_model,
            saved=saved,
            durable=self._retention.stays(step),
        )
        _note_published(self._journal, step, directory)

    def idle(self) -> bool:
        return self._merged is not None and self._merged.idle()

    def catch_up(self) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        if self._merged is not None:
            self._merged.finish()


def _note_published(journal: Journal | None, step: int, directory: Path) -> None:
    _logger.debug("Published %s", directory)
    weights = read_manifest(directory).weights
    if journal is not None and weights is not None:
        journal.note("weights_published", step=step, digest=weights.digest)


def gather_adapter(stored: StoredTensors, config: AdapterConfig) -> tuple[Factors, dict[str, Tensor]]:
    """Rank 0's: all factors by module, and the parameters of modules that are trained whole."""
    factors = {name for name in stored.names if name.endswith((".lora_A", ".lora_B"))}
    whole = {name for name in stored.names if name.rpartition(".")[0] in config.modules_to_save} - factors
    tensors = dict(stored.gathering(factors | whole))
    modules = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    pairs = {module: (tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]) for module in modules}
    return pairs, {name: tensors[name] for name in tensors if name in whole}


def merged_tensors(stored: StoredTensors, config: AdapterConfig) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's: the model with its adapters merged, W + scale B A, computed in float32."""
    factors, _ = gather_adapter(stored, config)
    base = stored.gathering({name for name in stored.names if not name.endswith((".lora_A", ".lora_B"))})
    for name, tensor in merge(base, config, factors):
        yield name, tensor.to(stored.dtype)


class BroadcastPublisher:
    """Sends weights from GPU to GPU. `files` writes those that stay on disk as well, and all once NCCL is given up.

    The last step is not sent, for whether anybody still takes it is not known.

    consumes     waits for                             unblocked by
    weights n    its group, at the first step          the servers' /init_weight_transfer
    weights n    broadcasts/ready_n                    the orchestrator, once all servers are paused
    weights n    the servers to receive                their /update_weights

    Weights that were only sent become files as soon as NCCL is given up: a server that was started again takes them.
    """

    def __init__(
        self, *, stored: StoredTensors, sender: Sender, root: Path, timeout: float, files: WeightPublisher
    ) -> None:
        """`root`: `broadcasts` of the run. `timeout`: seconds to wait for the orchestrator."""
        self._stored = stored
        self._sender = sender
        self._root = root
        self._timeout = timeout
        self._files = files
        self._has_left = False
        self._sent: int | None = None
        """The step published last, where it was sent and is in no file."""

    def publish(self, step: int) -> None:
        """Raises: DeadlineExceeded when the orchestrator does not react, ArtifactError when the disk refuses."""
        self._files.idle()
        retention = self._files.retention
        if step <= retention.published_before:
            self._files.publish(step)
            return
        is_sent = not retention.is_last(step) and self._is_connected() and self._is_sent(step)
        if not is_sent:
            self._leave_if_given_up(step)
        is_written = not is_sent or retention.stays(step)
        self._sent = None if is_written else step
        if is_written:
            self._files.publish(step)

    def publish_again(self, step: int) -> None:
        """Raises: ArtifactError when the disk refuses."""
        self._files.publish_again(step)

    def idle(self) -> bool:
        """Raises: ArtifactError when the disk refuses."""
        if not self._is_over():
            self._trying(self._sender.check)
        self._files.idle()
        return self._sent is not None and broadcasts.fallback_reason(self._root) is not None

    def catch_up(self) -> None:
        """Write what was only sent. Raises: ArtifactError when the disk refuses."""
        step, self._sent = self._sent, None
        if step is not None:
            self._leave_if_given_up(step)
            self._files.publish(step)

    def finish(self) -> None:
        self._files.finish()

    def _is_connected(self) -> bool:
        return not self._is_over() and self._trying(lambda: self._sender.open(self._is_over))

    def _is_sent(self, step: int) -> bool:
        announced = published("nccl", self._stored.checksums())
        broadcasts.announce(self._root, step, announced)
        if not broadcasts.wait_until_ready(self._root, step, timeout=self._timeout):
            return False
        with closing(self._stored.gathering()) as tensors:  # a send that was given up may still ask for more
            is_sent = self._trying(lambda: self._sender.send(tensors, self._is_over))
        if is_sent:
            self._files.note("weights_published", step, digest=announced.digest)
        return is_sent

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
