"""The processes that train one model together, as `torchrun` starts them; a process started alone is a rank of one.

collective     over              for
gradients      NCCL or gloo      parameters and gradients, by the mesh of `model.sharding`
tell / hear    gloo, patient     what rank 0 has decided and all must do: waiting is its business alone
gathered       gloo              metrics
saving         gloo, patient     checkpoints, in a thread of each rank
told           gloo, patient     which checkpoint to begin with, before there are such threads
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prime_rl import activity
from prime_rl.errors import ConfigError
from prime_rl.lifeline import WRITING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all that train. With `size` 1 and no process group, every call is a local one."""

    rank: int
    size: int
    device: torch.device
    control: Any = None
    """The gloo group of all ranks; None for a process alone."""
    saving: Any = None
    """Another one, in which their threads write a checkpoint together, beside everything else."""
    words: Any = None
    """Another one, in which the others wait for as long as rank 0 may have to wait for the rest of the run."""
    patience_s: float | None = None
    """How long that is."""
    saving_s: float | None = None
    """How long ranks wait for one another in `saving`."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which waits, logs, writes and publishes for all."""
        return self.rank == 0

    def tell(self, word: str) -> None:
        """Called by rank 0: what all others `hear`."""
        if self.control is not None:
            dist.broadcast_object_list([word], src=0, group=self.words)

    def hear(self) -> str:
        """Called by all others: waits for the word of rank 0."""
        words = [""]
        with activity.waiting(activity.own_name(), "the word of rank 0", deadline_s=self.patience_s):
            dist.broadcast_object_list(words, src=0, group=self.words)
        return words[0]

    def told(self, value: Any) -> Any:
        """`value` of rank 0, on every rank; the others wait while it reads files of any size."""
        if self.control is None:
            return value
        values = [value]
        with activity.waiting(activity.own_name(), "rank 0 to read the disk", deadline_s=self.saving_s):
            dist.broadcast_object_list(values, src=0, group=self.saving)
        return values[0]

    def gathered(self, value: Any) -> list[Any]:
        """`value` of every rank, in their order, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


@contextmanager
def joined(
    pick_device: Callable[[], torch.device], *, timeout: float, patience: float = 0.0, always: bool = False
) -> Iterator[Ranks]:
    """The ranks that `torchrun` has started, met; left again at the end.

    `timeout`: seconds after which a rank that waits for the others gives up; `patience`: so many more for the word of
    rank 0, which may have to wait itself. `always`: have a process group in a process alone too (sharding needs one).
    Raises: ConfigError where a GPU is missing, or torchrun.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = pick_device()
    if size == 1 and not always:
        yield Ranks(rank=0, size=1, device=device)
        return
    if size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but MASTER_ADDR is not set, so the ranks cannot meet: start them with torchrun, or "
            "unset WORLD_SIZE"
        )
    if device.type == "cuda":
        device = _own_gpu(rank)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    with activity.waiting(activity.own_name(), f"all {size} ranks to meet", deadline_s=timeout):
        dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=limit)
    control = dist.new_group(backend="gloo", timeout=limit)
    words = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + patience))
    saving_s = timeout + WRITING_S
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=saving_s))
    yield Ranks(
        rank=rank,
        size=size,
        device=device,
        control=control,
        saving=saving,
        words=words,
        patience_s=timeout + patience,
        saving_s=saving_s,
    )
    dist.destroy_process_group()  # after an error NCCL would wait for the others here, before anybody hears of it


def _own_gpu(rank: int) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} is number {local} on this machine, which has {torch.cuda.device_count()} visible GPUs; "
            "lower --nproc-per-node, or set device to cpu"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
