"""The state of training on disk: `trainer/` of a checkpoint.

    *.distcp, .metadata    the tensors (torch's distributed checkpoint): float32 weights that are trained, and what the
                           optimizer keeps of each. Every rank writes the slices that it holds, beside a table of what
                           lies where, and reads those that it needs. So any number of ranks reads what any other number
                           has written.
    record.msgpack         the rest, a `Record`

Weights that are not trained (all but the adapter, with LoRA) are those of the model directory and not here.

Torch's modules for it import DTensor (see `models.slices`), so only who writes or reads checkpoints imports them.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch.distributed as dist

from prime_rl.disk import refusal_behind
from prime_rl.errors import ArtifactError
from prime_rl.trainer.chance import Chance
from prime_rl.trainer.model.build import TrainedModel

_RECORD: Final = "record.msgpack"
_FORMAT: Final = 1

State = dict[str, Any]
"""`model`: weights by name. `optimizer`: as its `state_dict`; absent where weights alone are saved."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a checkpoint and is no tensor."""

    format: int = _FORMAT
    step: int
    """Optimizer steps made: the next batch is this one."""
    schedule_step: int
    """Where in the learning-rate schedule the next step is; another number where the two were counted apart."""
    total_tokens: int
    total_samples: int
    """Trained on, since step 0."""
    num_skipped: int
    """Of the last steps, in a row, those whose update was left out."""
    has_optimizer: bool
    chance: list[Chance]
    """Generators of random numbers, by rank."""
    data: bytes | None = None
    """Where in its data `sft` is (`trainer.sft.position`); None for RL."""


class Stateful(Protocol):
    """An optimizer, as far as its state goes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, from the start; its tensors are filled in place by whoever loads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was loaded."""


def import_saving() -> None:
    """Import what `save_state` needs, before training begins.

    In mid-training it would hold up a step, and what it makes would be looked through by all full collections of
    garbage, which leave out what was there before.
    """
    import torch.distributed.checkpoint.filesystem  # noqa: PLC0415
    import torch.distributed.checkpoint.state_dict_saver  # noqa: F401, PLC0415


def state_of(model: TrainedModel, optimizer: Stateful | None) -> State:
    """The tensors themselves, no copies, as they lie on this rank. `optimizer` None: of the weights alone."""
    weights = {name: parameter.detach() for name, parameter in model.parameters.items()}
    return {"model": weights} if optimizer is None else {"model": weights, "optimizer": optimizer.state_dict()}


def save_state(directory: Path, state: State, group: Any = None) -> None:
    """Write a state to `directory`, which all ranks see. All ranks of `group` at once; None: all of them.

    Raises: ArtifactError, the same on every rank; OSError where the machine refuses.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    try:
        with _alone_or_not() as no_dist:
            writer = FileSystemWriter(directory, sync_files=not no_dist)  # a disk of several machines; else `manifest`
            save(state, storage_writer=writer, process_group=group, no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError) as error:
        if (refusal := refusal_behind(_failures(error), directory)) is not None:
            raise refusal from error
        raise ArtifactError(f"cannot write the trainer's state to {directory}: {_reason(error)}") from error


def load_state(directory: Path, model: TrainedModel, optimizer: Stateful | None, group: Any = None) -> None:
    """Read it back, in place. All ranks at once; `optimizer` None: the weights alone.

    Raises: ArtifactError where it is damaged or of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    state = state_of(model, optimizer)
    try:
        with _alone_or_not() as no_dist:
            load(state, storage_reader=FileSystemReader(directory), process_group=group, no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise ArtifactError(
            f"cannot read the trainer's state from {directory}, or it is that of another model or optimizer: "
            f"{_reason(error)}"
        ) from error
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def write_record(directory: Path, record: Record) -> None:
    """Into the directory of `save_state`. Raises: OSError."""
    (directory / _RECORD).write_bytes(msgspec.msgpack.encode(record))


def read_record(directory: Path) -> Record:
    """Raises: ArtifactError naming the file where it is missing or of another form."""
    path = directory / _RECORD
    try:
        record = msgspec.msgpack.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} is not the record of a checkpoint: {error}") from error
    if record.format != _FORMAT:
        raise ArtifactError(f"{path} has format {record.format}; this version reads format {_FORMAT}")
    return record


@contextmanager
def _alone_or_not() -> Iterator[bool]:
    """Whether this process trains alone, of which torch needs not warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield not dist.is_initialized()


def _failures(error: BaseException) -> list[BaseException]:
    """What went wrong on each rank that failed."""
    of_ranks = getattr(error, "failures", {})  # of a CheckpointException
    return [failure for failure, _ in of_ranks.values()] or [error]


def _reason(error: BaseException) -> str:
    """The first line of what the first rank that failed says."""
    first = _failures(error)[0]
    lines = str(first).strip().splitlines()
    return lines[0] if lines else type(first).__name__
