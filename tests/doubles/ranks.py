"""Several ranks on this machine, over gloo or NCCL: a function that runs in each of them."""

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.multiprocessing as mp

from prime_rl.trainer.ranks import joined

TIMEOUT_S = 180.0


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """What `work(ranks, *arguments)`, a function of a module, returned on each rank; raises what the first one said.

    `device`: cpu, or cuda with a GPU for each.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ranks are forked from a process that has imported all this once, and has no threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["prime_rl.trainer.build", "torch._dynamo"])  # the second for `fully_shard`
    answers: Any = context.Queue()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    processes = [
        context.Process(
            target=_run,
            args=(work, arguments, device, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, answers),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(pickle.loads(answers.get(timeout=TIMEOUT_S)) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    said = [answer for answer in found.values() if isinstance(answer, _Failed)]
    assert not said, said[0].words
    return [found[rank] for rank in range(size)]


class _Failed:
    def __init__(self, words: str) -> None:
        self.words = words


def _run(work: Callable[..., Any], arguments: Any, device: str, env: Mapping[str, str], answers: Any) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    rank = int(env["RANK"])
    try:
        with joined(lambda: torch.device(device), timeout=TIMEOUT_S) as ranks:
            answer = work(ranks, *arguments)
        answers.put(pickle.dumps((rank, answer)))  # bytes: tensors of its own are gone with the process
    except BaseException:  # noqa: BLE001 (told by the parent)
        answers.put(pickle.dumps((rank, _Failed(traceback.format_exc()))))
