"""A process of a plan that runs on this machine: started, looked at when it has ended, and ended with its family.

Its family is what descends from it. Every descendant inherits a mark in its environment, by which it is found when its
parents are gone and it has a session of its own; what starts with an environment of its own is found by ancestry.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from prime_rl import activity, lifeline
from prime_rl.config.writing import write_toml
from prime_rl.disk import refusal
from prime_rl.errors import ProcessFailed
from prime_rl.launch.machine import ProcessSpec
from prime_rl.launch.plan import config_path
from prime_rl.paths import RunPaths, drafts

ENDING_POLL_S = 0.05
GRACE_S = 5.0
KILL_S = 60.0
"""Seconds in which a process is gone that is killed, before it is started again. The system gives back its memory
first: of hundreds of GB that are pinned for a GPU, of a core dump, or under a disk that answers slowly, that takes a
while, and a run that could go on would end. One that waits for a broken disk or driver is there still."""
STOP_S = 10.0
"""The same where the run ends: nobody waits for it but the user."""
NUM_LAST_LINES = 15
AGENT = "prime_rl.trainer.agent"

MARK = "PRIME_RL_FAMILY"
"""Variable that a process and all its descendants have: `<launcher's token>/<name>/<which start of it>`."""


@dataclass(frozen=True, slots=True)
class Running:
    """One start of a process."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    """Where its own lines begin: all starts of a process write to one file."""
    mark: str
    since: float
    """When it was started, on the monotonic clock."""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()


def start(spec: ProcessSpec, output_dir: Path, *, number: int = 0, env: Mapping[str, str] | None = None) -> Running:
    """Start `spec` in a session of its own. `number`: how often it was started before. `env`: besides the plan's.

    Raises: ProcessFailed where the machine has no process, file or memory for it.
    """
    argv = list(spec.argv)
    if spec.config is not None:
        config = config_path(spec, output_dir)
        write_toml(spec.config, config)
        argv = [sys.executable, *_torchrun(spec.num_ranks), "-m", "prime_rl.cli", spec.command, "@", str(config)]
    log = RunPaths(output_dir).log(spec.name)
    token = lifeline.launcher_token()
    mark = f"{token}/{spec.name}/{number}"
    own = {lifeline.VARIABLE: token, MARK: mark, activity.NAME: spec.name}
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            offset = file.tell()
            process = subprocess.Popen(
                argv,
                env={**os.environ, **spec.env, **(env or {}), **own},
                stdin=subprocess.DEVNULL,
                stdout=None if spec.owns_terminal else file,
                stderr=None if spec.owns_terminal else subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise ProcessFailed(f"{spec.name} cannot be started: {refusal(error, log)}") from error
    return Running(spec, process, log, offset, mark, time.monotonic())


def _torchrun(num_ranks: int) -> tuple[str, ...]:
    """What starts several processes with the command that follows. They meet on loopback, at a port that is free."""
    if num_ranks == 1:
        return ()
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
    return ("-m", AGENT, "--nproc-per-node", str(num_ranks), *meeting)


def how_it_ended(one: Running) -> str:
    code = one.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{one.spec.name} {how if code else 'ended before the run was complete'}"


def obituary(one: Running, how: str | None = None) -> str:
    """Which process ended, how, the reason it gave, and its last lines."""
    how = how or how_it_ended(one)
    if one.spec.owns_terminal:
        return how
    quoted = "\n".join(f"  | {line}" for line in _last_lines(one)) or "  | (nothing was written)"
    return f"{with_reason(one, how)}\nthe last lines of {one.log}:\n{quoted}"


def with_reason(one: Running, how: str) -> str:
    """`how` it ended, and the reason it gave, in one line."""
    said_by_it = re.compile(rf"{re.escape(one.spec.command)}( \(rank \d+\))?: (?!note: )")
    said = next((line for line in reversed(_last_lines(one)) if said_by_it.match(line)), None)
    return f"{how}: {said.partition(': ')[2]}" if said else how


def _last_lines(one: Running) -> list[str]:
    if one.spec.owns_terminal:
        return []
    with one.log.open("rb") as file:
        file.seek(one.log_offset)
        return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=NUM_LAST_LINES)]


def stop(running: Sequence[Running], paths: RunPaths, hurry: threading.Event) -> None:
    """Ask every process to end, then make it; descendants that left its session included. `hurry`: at once."""
    families = [process for one in running if one.code is None for process in family(one)]  # of the others: by mark
    for one in running:
        if one.code is None:
            one.process.terminate()
    _wait_for_ends(running, paths, hurry)
    for one in running:
        if one.code is None:
            one.process.kill()
            one.process.wait()
    _end(families, [one.mark for one in running], STOP_S)


def _wait_for_ends(running: Sequence[Running], paths: RunPaths, hurry: threading.Event) -> None:
    """Until all have ended, for GRACE_S at most; as long as the trainer is writing weights or a checkpoint, longer."""
    start = seen = time.monotonic()
    is_told = False
    while any(one.code is None for one in running) and not hurry.wait(ENDING_POLL_S):
        now = time.monotonic()
        trainers = [one.spec for one in running if one.spec.command == "trainer" and one.code is None]
        written = [draft for spec in trainers for root in _written_by(spec, paths) for draft in drafts(root)]
        if written and now < start + lifeline.WRITING_S:
            seen = now
        if now >= seen + GRACE_S:
            return
        if written and now >= start + GRACE_S and not is_told:
            is_told = True
            where = ", ".join(str(draft.parent) for draft in written)
            print(f"waiting for the trainer to finish what it writes to {where}; Ctrl-C ends it now", file=sys.stderr)


def _written_by(trainer: ProcessSpec, paths: RunPaths) -> tuple[Path, ...]:
    """Where it writes what takes its time and is worth waiting for."""
    ckpt = getattr(trainer.config, "ckpt", None)
    checkpoints = paths.checkpoints if ckpt is None else ckpt.output_dir or paths.checkpoints
    return paths.weights, paths.merged, checkpoints, paths.recovery


def end_family(one: Running) -> list[psutil.Process]:
    """Kill a process and whatever descends from it, and wait until all of it is gone; what is still there then."""
    members = family(one)
    with contextlib.suppress(psutil.NoSuchProcess):
        members += [psutil.Process(one.process.pid)] if one.code is None else []
    kill(members)
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(timeout=KILL_S)
    return _end(members, [one.mark], KILL_S)


def _end(members: Sequence[psutil.Process], marks: Sequence[str], within_s: float) -> list[psutil.Process]:
    """Kill `members` and whatever has one of `marks`, and wait so long until all are gone; those that are not."""
    end = time.monotonic() + within_s
    while left := [*filter(is_there, members), *marked(marks)]:  # what was started while we killed, too
        kill(left)
        if time.monotonic() >= end:
            break
        time.sleep(ENDING_POLL_S)
    return left


def family(one: Running) -> list[psutil.Process]:
    """The descendants of a process that runs, or died just now: by mark, by session, and by ancestry.

    Its session outlives it, and nobody else is given its pid as long as that has a member. Once all are gone, the pid
    may be a stranger's: where there is such a process again, only marks count.
    """
    found = {process.pid: process for process in marked([one.mark])}
    is_ours = one.code is None or not psutil.pid_exists(one.process.pid)
    for process in psutil.process_iter() if is_ours else ():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == one.process.pid:
                found[process.pid] = process
    for pid in [*([one.process.pid] if is_ours else []), *found]:
        with contextlib.suppress(psutil.Error):
            found |= {process.pid: process for process in psutil.Process(pid).children(recursive=True)}
    found.pop(one.process.pid, None)
    return [process for process in found.values() if is_there(process)]


def marked(marks: Iterable[str], *, by_prefix: bool = False) -> list[psutil.Process]:
    """The processes that run and have one of `marks`, or one that begins so; not this one."""
    wanted = tuple(marks)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK) if process.pid != os.getpid() else None
            if mark is not None and (mark.startswith(wanted) if by_prefix else mark in wanted) and is_there(process):
                found.append(process)
    return found


def is_there(process: psutil.Process) -> bool:
    """Whether it runs, and does not only wait to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks the start time: a reused pid is never hit
