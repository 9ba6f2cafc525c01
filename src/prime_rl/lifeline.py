"""A process that was started by `rl` ends when `rl` is gone, however `rl` ended (`kill -9` included).

The launcher puts its pid and start time into the environment, so every descendant can watch it, whatever starts it in
between (torchrun, a worker pool). The start time guards against a reused pid.
"""

import os
import signal
import threading
import time

import psutil

VARIABLE = "PRIME_RL_LAUNCHER"
POLL_S = 0.5
GRACE_S = 5.0


def launcher_token() -> str:
    """What a launcher puts into `PRIME_RL_LAUNCHER` of its children: its pid and start time."""
    process = psutil.Process()
    return f"{process.pid}:{process.create_time():.2f}"


def is_alive(token: str) -> bool:
    """Whether the process that made `token` still runs."""
    pid, _, started = token.partition(":")
    try:
        process = psutil.Process(int(pid))
        return f"{process.create_time():.2f}" == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
