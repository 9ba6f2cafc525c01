"""The processes that train one model together, as `torchrun` starts them; a process started alone is a rank of one.

collective     over              for
gradients      NCCL or gloo      parameters and gradients, by the mesh of `model.sharding`
tell / hear    gloo, patient     what rank 0 has decided and all must do: waiting is its business alone
gathered       gloo              metrics
saving         gloo, patient     checkpoints, in a thread of each rank
told           gloo              what rank 0 finds on the disk before the first step; its signs of life renew the wait
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from prime_rl import activity
from prime_rl.errors import ConfigError
from prime_rl.lifeline import WRITING_S

SIGN_S: Final = 5.0
"""Between two signs of life of rank 0, at most."""
STALLED_S: Final = 600.0
"""Rank 0 that got no further for so long gives no more of them: the disk hangs."""

T = TypeVar("T")


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
    sign_s: float = SIGN_S
    """Between two signs of life of rank 0, several of which come before anybody gives up."""

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

    def told(self, doing: str, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank. The others wait for as long as it gets on (`activity.beat`).

        Raises: what `work` does, on rank 0.
        """
        words: list[Any] = [None]
        if not self.is_leader:
            with activity.waiting(activity.own_name(), f"rank 0: {doing}", deadline_s=STALLED_S) as waiting:
                while words[0] is None:
                    dist.broadcast_object_list(words, src=0, group=self.control)
                    waiting.renew()
            return cast(T, words[0][0])
        with activity.doing(doing, deadline_s=STALLED_S) as task:
            if self.control is None:
                return work()
            is_done = threading.Event()
            signs = threading.Thread(target=self._give_signs, args=(task, is_done), name="signs", daemon=True)
            signs.start()
            try:
                words[0] = (work(),)
            finally:
                is_done.set()
            signs.join()
        dist.broadcast_object_list(words, src=0, group=self.control)
        return cast(T, words[0][0])

    def _give_signs(self, task: activity.Task, is_done: threading.Event) -> None:
        """In a thread of rank 0: tell the others now and then that it gets on with `task`, while it does."""
        with suppress(RuntimeError):  # one of them is gone, which `told` hears when it tells the result
            while not is_done.wait(self.sign_s):
                if task.seconds < STALLED_S:
                    dist.broadcast_object_list([None], src=0, group=self.control)

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
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + WRITING_S))
    yield Ranks(
        rank=rank,
        size=size,
        device=device,
        control=control,
        saving=saving,
        words=words,
        patience_s=timeout + patience,
        sign_s=min(SIGN_S, timeout / 3),
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
