"""A worker process as its parent has it: started with a socket, and ended with everything that it started.

It leads a process group, in which are the processes that the environment's code starts. They end with it: they would
stay for ever, and may hold its end of the socket, so that nobody would notice that it is gone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

from prime_rl import activity, lifeline
from prime_rl.disk import is_refusal, refusal
from prime_rl.environments.frames import Frames
from prime_rl.logs import get_logger

POLL_S: Final = 0.02
LOOK_INTERVAL_S: Final = 0.5
"""Time between two looks at whether a process is gone whose socket is still held."""
KILL_S: Final = 5.0
"""Seconds in which a process ends that is killed; one that waits for a broken disk or driver may not."""

_logger = get_logger(__name__)


class WorkerProcess:
    """A process and our end of its socket. Made by `start`; whoever starts it awaits `end`."""

    def __init__(self, process: subprocess.Popen[bytes], frames: Frames, label: str) -> None:
        self.frames = frames
        self._process = process
        self._name = f"{label} worker {process.pid}"
        activity.child_started(self._name, process.pid)
        self._clock = asyncio.get_running_loop()
        self._next_look = self._clock.call_later(LOOK_INTERVAL_S, self._look, False)

    @classmethod
    async def start(cls, log: Path, label: str = "environment") -> WorkerProcess:
        """Start a worker that writes to `log`, known as one of `label`.

        Raises: OSError when the machine has no process or file for it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            frames = await Frames.over(ours)
            # Nothing is awaited from here on: whoever is cancelled has either no process, or one that it knows.
            try:
                with _opened(log) as file:
                    return cls(_spawn(theirs, file), frames, label)
            except OSError:
                frames.abort()
                raise

    def kill(self) -> None:
        """End it at once. What it sent and was not read is lost."""
        self._signal_all()
        self.frames.abort()

    async def end(self, patience_s: float) -> int | None:
        """Close the socket and wait for the process to end; kill it after `patience_s`. Whatever way this is left,
        nothing of it is left. Returns its exit code; None when it does not even end then."""
        self._next_look.cancel()
        self.frames.abort()
        kill_at = time.monotonic() + patience_s
        try:
            while not self._has_ended() and time.monotonic() < kill_at + KILL_S:
                if time.monotonic() >= kill_at:
                    self._signal_all()
                await asyncio.sleep(POLL_S)
        finally:
            code = self.reap()
        return code

    def reap(self) -> int | None:
        """End it and what it started, and wait for it, holding up the event loop. Returns its exit code."""
        self._signal_all()
        activity.child_ended(self._name)
        try:
            return self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            _logger.error("Process %d was killed and does not end; it is left behind", self._process.pid)
            return None

    def _has_ended(self) -> bool:
        """It stays a zombie, so that its pid, which is that of its group, is nobody else's."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _signal_all(self) -> None:
        """Kill its group, which is there for as long as it was not waited for."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # the latter is what macOS says of zombies
                self._process.kill()

    def _look(self, was_gone: bool) -> None:
        """Its socket tells its end, unless others hold it: they are ended, and then are not waited for."""
        is_gone = self._has_ended()
        if was_gone:
            self.frames.abort()
        elif is_gone:
            self._signal_all()
        self._next_look = self._clock.call_later(LOOK_INTERVAL_S, self._look, is_gone)


def _opened(log: Path) -> IO[bytes]:
    """For appending; where the disk refuses, what the worker says is lost. Raises: OSError where files ran out."""
    try:
        return log.open("ab")
    except OSError as error:
        if not is_refusal(error) or error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        _logger.warning("%s is not written, and the run goes on: %s", log, refusal(error, log))
        return Path(os.devnull).open("ab")


def _spawn(connection: socket.socket, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a worker on its end of the socket. It watches this process and ends with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "prime_rl.environments.worker", "--fd", str(connection.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(connection.fileno(),),
        env=os.environ | {lifeline.VARIABLE: lifeline.launcher_token()},
        process_group=0,  # Ctrl-C at the terminal is for the orchestrator, which then ends its workers
    )
