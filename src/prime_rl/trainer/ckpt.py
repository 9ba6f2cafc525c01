"""The state of training that lies on the ranks: float32 weights that are trained, and the optimizer's.

Each rank writes the slices that it holds, beside a table of what lies where (torch's distributed checkpoint), and each
reads those that it needs. So any number of ranks can read what any other number has written. Today only tests
call this; checkpoints of runs, which are to come, will.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from prime_rl.errors import ArtifactError
from prime_rl.trainer.model.build import TrainedModel


class Stateful(Protocol):
    """An optimizer, as far as its state goes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, from the start; its tensors are filled in place by whoever loads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was loaded."""


def save_state(directory: Path, model: TrainedModel, optimizer: Stateful) -> None:
    """Write the state to `directory`, which all ranks see. All ranks at once. Raises: ArtifactError."""
    try:
        with _alone_or_not() as no_dist:
            save(_state(model, optimizer), checkpoint_id=directory, no_dist=no_dist)
    except (CheckpointException, OSError) as error:
        raise ArtifactError(f"cannot write the trainer's state to {directory}: {_reason(error)}") from error


def load_state(directory: Path, model: TrainedModel, optimizer: Stateful) -> None:
    """Read it back, in place. All ranks at once. Raises: ArtifactError where it is damaged or of another model."""
    state = _state(model, optimizer)
    try:
        with _alone_or_not() as no_dist:
            load(state, checkpoint_id=directory, no_dist=no_dist)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise ArtifactError(
            f"cannot read the trainer's state from {directory}, or it is that of another model or optimizer: "
            f"{_reason(error)}"
        ) from error
    optimizer.load_state_dict(state["optimizer"])


@contextmanager
def _alone_or_not() -> Iterator[bool]:
    """Whether this process trains alone, of which torch needs not warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield not dist.is_initialized()


def _state(model: TrainedModel, optimizer: Stateful) -> dict[str, Any]:
    weights = {name: parameter.detach() for name, parameter in model.parameters.items()}
    return {"model": weights, "optimizer": optimizer.state_dict()}


def _reason(error: BaseException) -> str:
    """The first line of what the first rank that failed says."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
