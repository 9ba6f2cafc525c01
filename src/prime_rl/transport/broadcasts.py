"""Weights from GPU to GPU: what trainer and orchestrator tell each other about it through files. Both ends; no torch.

    trainer       broadcasts/step_N/   the marker alone: kind `nccl`, every tensor with its checksum, in sending order
    orchestrator  broadcasts/ready_N   all servers are paused and will receive; the trainer sends
    either        broadcasts/FALLBACK  why weights come as files (`weights/step_N`) from that step on
    orchestrator  broadcasts/DONE      it has ended; nobody takes weights any more

The trainer announces a step only where it is not written as files, so that either side of a step is known from where
it lies. Nothing here outlives a crash of the machine, and nothing needs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prime_rl import activity
from prime_rl.disk import refused
from prime_rl.errors import DeadlineExceeded
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import PublishedWeights, complete_steps, draft_dir, remove_dir

FALLBACK: Final = "FALLBACK"
DONE: Final = "DONE"
MEETING_TIMEOUT_S: Final = 300
"""Seconds after which vLLM, in a server, gives up waiting for the trainer; it takes no other number (0.26, 0.29)."""
_POLL_S: Final = 0.005
_KEPT: Final = 2  # servers may still be reading the announcement before the last


def announce(root: Path, step: int, weights: PublishedWeights) -> Path:
    """Say what will be sent for `step`, and forget older announcements. The trainer's.

    Raises: DiskError when the disk refuses.
    """
    final = step_dir(root, step)
    with draft_dir(final, durable=False) as draft:
        draft.weights = weights
    for old in complete_steps(root)[:-_KEPT]:
        remove_dir(step_dir(root, old))
        ready_file(root, old).unlink(missing_ok=True)
    return final


def wait_until_ready(root: Path, step: int, *, timeout: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait until the servers are ready to receive `step`; False when nothing is sent any more. The trainer's.

    Raises: DeadlineExceeded after `timeout` seconds.
    """
    ready = ready_file(root, step)
    with activity.waiting("orchestrator", f"all servers to be ready for weights {step}", deadline_s=timeout) as waiting:
        while not ready.exists():
            if is_over(root):
                return False
            if waiting.seconds >= timeout:  # nobody is started again for it: weights come as files then
                raise DeadlineExceeded(
                    f"nobody was ready to receive weights {step} within {timeout:g} s (weight_broadcast.timeout): the "
                    f"orchestrator did not write {ready}; look at its log, or set weight_broadcast.type = 'filesystem'"
                )
            sleep(_POLL_S)
    return not is_over(root)


def ready_file(root: Path, step: int) -> Path:
    """What the orchestrator creates when the servers wait for `step`."""
    return root / f"ready_{step}"


def fall_back(root: Path, reason: str) -> None:
    """Give up on NCCL; the first reason stays. Either side's. Raises: DiskError when the disk refuses."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / FALLBACK).open("x", encoding="utf-8") as file:
            file.write(f"{reason}\n")
    except FileExistsError:
        return
    except OSError as error:
        raise refused(error, root / FALLBACK) from error


def finish(root: Path) -> None:
    """Nobody takes weights any more. The orchestrator's, when it ends. Raises: DiskError when the disk refuses."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / DONE).touch()
    except OSError as error:
        raise refused(error, root / DONE) from error


def is_over(root: Path) -> bool:
    """Whether nothing is sent from GPU to GPU any more."""
    return (root / FALLBACK).exists() or (root / DONE).exists()


def fallback_reason(root: Path) -> str | None:
    """Why weights come as files; None while they do not."""
    try:
        return (root / FALLBACK).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
