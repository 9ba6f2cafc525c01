"""A process that was started by `rl` ends when `rl` is gone, however `rl` ended (`kill -9` included).

The launcher puts its pid and start time into the environment, so every descendant can watch it, whatever starts it in
between (torchrun, a worker pool). The start time guards against a reused pid; on Linux it is counted from boot, since a
wall-clock start time moves when the clock is set.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

HAS_PROC = Path("/proc/self/stat").exists()
if not HAS_PROC:
    import psutil  # every command imports this module, and psutil is slow to load

VARIABLE = "PRIME_RL_LAUNCHER"
POLL_S = 0.5
GRACE_POLL_S = 0.1
GRACE_S = 5.0
WRITING_S = 3600.0
"""For weights that are being written when a trainer is told to end: a terabyte at 300 MB a second."""

unfinished: list[Callable[[], bool]] = []
"""Each tells whether this process is at something that is to be waited for when the process is to end."""


def launcher_token() -> str:
    """What a launcher puts into `PRIME_RL_LAUNCHER` of its children: its pid and start time."""
    return f"{os.getpid()}:{_started(os.getpid())}"


def boot_id() -> str:
    """Another one every time that this machine starts; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def token_of(pid: int) -> str | None:
    """The same of another process; None for one that is gone, or only waits to be reaped."""
    started = _started(pid)
    return None if started is None else f"{pid}:{started}"


def is_alive(token: str) -> bool:
    """Whether the process that made `token` still runs."""
    pid, _, started = token.partition(":")
    return _started(int(pid)) == started


def _started(pid: int) -> str | None:
    """When a process that runs was started; None for one that is gone, or only waits to be reaped.

    In the clock ticks since boot that Linux keeps; elsewhere in seconds since the epoch.
    """
    if HAS_PROC:
        try:
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if state == "Z" else numbers[18]
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def watch_launcher(*, kills_group: bool = False) -> None:
    """Watch the launcher from a daemon thread, if there is one: SIGTERM to this process when it is gone, then exit.

    `kills_group`: this process leads a group of its own, in which are processes that do not watch; all are killed.
    """
    token = os.environ.get(VARIABLE)
    if token:
        threading.Thread(target=_watch, args=(token, kills_group), name="lifeline", daemon=True).start()


def _watch(token: str, kills_group: bool) -> None:
    while is_alive(token):
        time.sleep(POLL_S)
    if kills_group:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)
    end_after_grace(1)


def end_after_grace(code: int) -> NoReturn:
    """End this process, unless it does so itself within GRACE_S after it has finished what is `unfinished`."""
    start = seen = time.monotonic()
    while (now := time.monotonic()) < seen + GRACE_S:
        if now < start + WRITING_S and any(one() for one in unfinished):
            seen = now
        time.sleep(GRACE_POLL_S)
    os._exit(code)
