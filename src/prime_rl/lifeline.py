"""A process that was started by `rl` ends when `rl` is gone, however `rl` ended (`kill -9` included).

The launcher puts its pid and start time into the environment, so every descendant can watch it, whatever starts it in
between (torchrun, a worker pool). The start time guards against a reused pid; on Linux it is counted from boot, since a
wall-clock start time moves when the clock is set.
"""

import os
import signal
import threading
import time
from pathlib import Path

HAS_PROC = Path("/proc/self/stat").exists()
if not HAS_PROC:
    import psutil  # every command imports this module, and psutil is slow to load

VARIABLE = "PRIME_RL_LAUNCHER"
POLL_S = 0.5
GRACE_S = 5.0


def launcher_token() -> str:
    """What a launcher puts into `PRIME_RL_LAUNCHER` of its children: its pid and start time."""
    return f"{os.getpid()}:{_started(os.getpid())}"


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


def watch_launcher() -> None:
    """Watch the launcher from a daemon thread, if there is one: SIGTERM to this process when it is gone, then exit."""
    token = os.environ.get(VARIABLE)
    if token:
        threading.Thread(target=_watch, args=(token,), name="lifeline", daemon=True).start()


def _watch(token: str) -> None:
    while is_alive(token):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
