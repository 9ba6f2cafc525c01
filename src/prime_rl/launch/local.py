"""Starts a plan on this machine and watches it.

Each process runs in a session of its own, so that a Ctrl-C reaches the launcher alone, which then stops all of them in
order, the trainer once the weights that it is writing are there; a second Ctrl-C ends all of them at once. When one
fails, the rest are stopped and the error names it, with the reason it gave and its last lines; only of several servers
one may die. A launcher that is killed leaves nothing behind: every process watches it (`lifeline`).
"""

import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from prime_rl import lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.config.writing import write_toml
from prime_rl.errors import ProcessFailed
from prime_rl.launch.machine import Machine, ProcessSpec
from prime_rl.launch.plan import config_path
from prime_rl.launch.servers import ROUTER
from prime_rl.monitors.events import EventLog
from prime_rl.paths import RunPaths, drafts

POLL_S = 0.2
ENDING_POLL_S = 0.05
GRACE_S = 5.0
NUM_LAST_LINES = 15
PROBE_TIMEOUT_S = 2.0
AGENT = "prime_rl.trainer.agent"


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The GPUs and cores that processes started here would see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = tuple(str(index) for index in range(_count_gpus()))
    else:
        gpus = tuple(gpu.strip() for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1")
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        gpus=gpus, num_cpus=num_cpus, has_vllm=_has_vllm(), router=_find_router(), free_port=_find_free_port()
    )


def _has_vllm() -> bool:
    """Importing either would take seconds."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
        return False
    return not importlib.metadata.version("torch").endswith("+cpu")


def _find_free_port() -> int | None:
    """Below the ports that connections are given, and drawn, so that two runs that start together take two."""
    for port in random.sample(range(20000, 32768), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return None


def _find_router() -> str | None:
    """The vllm-router command: beside this Python, else wherever commands are."""
    beside = Path(sys.executable).with_name(ROUTER)
    return str(beside) if beside.exists() else shutil.which(ROUTER)


def _count_gpus() -> int:
    """NVIDIA GPUs of this machine: by their device files, else (WSL has none) by asking the driver's own command."""
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    if files or shutil.which("nvidia-smi") is None:
        return len(files)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def named_machine(environment: Mapping[str, str]) -> Machine | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, looked at by nobody; None where it is not set."""
    return replace(this_machine(environment), free_port=None) if "CUDA_VISIBLE_DEVICES" in environment else None


def find_server(config: InferenceConfig) -> ClientConfig | None:
    """A server that already runs where `config` would start one on this machine; None when nobody answers."""
    address = f"http://localhost:{config.server.port}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{address}/health", timeout=PROBE_TIMEOUT_S):
            return ClientConfig(base_url=(f"{address}/v1",))
    except (OSError, http.client.HTTPException):
        return None


@dataclass(slots=True)
class _Running:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    log: Path
    was_told: bool = False
    """It died, others do its work, and that was said."""


class Stopped(BaseException):
    """SIGTERM reached the launcher."""


def run_local(specs: Sequence[ProcessSpec], output_dir: Path, on_tick: Callable[[], None] = lambda: None) -> None:
    """Start `specs`, call `on_tick` a few times a second, and return when every process that ends by itself has.

    Raises ProcessFailed when any of them fails, and when a service ends before the others are done. One of several
    servers may: while another one runs, that is an event and not the end. Whatever way this function is left, nothing
    that it started is left running.
    """
    running: list[_Running] = []
    hurry = threading.Event()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        for spec in specs:
            running.append(_start(spec, output_dir))
        while not _finished(running, RunPaths(output_dir).events):
            time.sleep(POLL_S)
            on_tick()
        on_tick()
    finally:
        for number in handlers:
            signal.signal(number, lambda *_: hurry.set())
        _stop(running, RunPaths(output_dir), hurry)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped


def _start(spec: ProcessSpec, output_dir: Path) -> _Running:
    argv = list(spec.argv)
    if spec.config is not None:
        config = config_path(spec, output_dir)
        write_toml(spec.config, config)
        argv = [sys.executable, *_torchrun(spec.num_ranks), "-m", "prime_rl.cli", spec.command, "@", str(config)]
    log = RunPaths(output_dir).log(spec.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **spec.env, lifeline.VARIABLE: lifeline.launcher_token()}
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if spec.owns_terminal else file,
            stderr=None if spec.owns_terminal else subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(spec, process, log)


def _torchrun(num_ranks: int) -> tuple[str, ...]:
    """What starts several processes with the command that follows. They meet on loopback, at a port that is free."""
    if num_ranks == 1:
        return ()
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
    return ("-m", AGENT, "--nproc-per-node", str(num_ranks), *meeting)


def _finished(running: Sequence[_Running], events: Path) -> bool:
    """Whether the run is complete; ProcessFailed when a process ended as it should not."""
    ended = [one for one in running if one.process.poll() is not None]
    for one in [one for one in ended if _is_survived(one, running)]:
        ended.remove(one)
        if not one.was_told:
            one.was_told = True
            with EventLog.opened(events) as log:
                log.write(f"{_how_it_ended(one)}; the run goes on with the others; see {one.log}")
    for one in ended:
        if one.process.returncode != 0:
            raise ProcessFailed(_obituary(one))
    done = all(one.process.returncode == 0 for one in running if not one.spec.is_service)
    for one in ended:
        if one.spec.is_service and not done:
            raise ProcessFailed(_obituary(one))
    return done


def _is_survived(one: _Running, running: Sequence[_Running]) -> bool:
    """Whether it is one of several servers that do the same work, and another one still runs."""
    others = [other for other in running if other is not one and other.spec.pool == one.spec.pool]
    return one.spec.is_service and bool(one.spec.pool) and any(other.process.poll() is None for other in others)


def _how_it_ended(one: _Running) -> str:
    code = one.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{one.spec.name} {how if code else 'ended before the run was complete'}"


def _obituary(one: _Running) -> str:
    """Which process ended, how, the reason it gave, and its last lines."""
    if one.spec.owns_terminal:
        return _how_it_ended(one)
    with one.log.open(encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip() for line in deque(file, maxlen=NUM_LAST_LINES)]
    said_by_it = re.compile(rf"{re.escape(one.spec.command)}( \(rank \d+\))?: ")
    reason = next((line for line in reversed(lines) if said_by_it.match(line)), None)
    said = f": {reason.partition(': ')[2]}" if reason else ""
    quoted = "\n".join(f"  | {line}" for line in lines) or "  | (nothing was written)"
    return f"{_how_it_ended(one)}{said}\nthe last lines of {one.log}:\n{quoted}"


def _stop(running: Sequence[_Running], paths: RunPaths, hurry: threading.Event) -> None:
    """Ask every process to end, then make it; descendants that left its session included. `hurry`: at once."""
    families = [family for one in running for family in _family(one)]
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()
    _wait_for_ends(running, paths, hurry)
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    for process in families:
        try:
            process.kill()  # psutil checks the start time: a reused pid is never hit
        except psutil.NoSuchProcess:
            continue


def _wait_for_ends(running: Sequence[_Running], paths: RunPaths, hurry: threading.Event) -> None:
    """Until all have ended, for GRACE_S at most; as long as the trainer is writing weights, longer."""
    start = seen = time.monotonic()
    is_told = False
    while any(one.process.poll() is None for one in running) and not hurry.wait(ENDING_POLL_S):
        now = time.monotonic()
        has_trainer = any(one.spec.command == "trainer" and one.process.poll() is None for one in running)
        written = [*drafts(paths.weights), *drafts(paths.merged)] if has_trainer else []
        if written and now < start + lifeline.WRITING_S:
            seen = now
        if now >= seen + GRACE_S:
            return
        if written and now >= start + GRACE_S and not is_told:
            is_told = True
            where = ", ".join(str(draft.parent) for draft in written)
            print(f"waiting for the trainer to write weights to {where}; Ctrl-C ends it now", file=sys.stderr)


def _family(one: _Running) -> list[psutil.Process]:
    """The descendants of a process, found by ancestry and by session (which outlives the ancestor)."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.pid != one.process.pid and os.getsid(process.pid) == one.process.pid:
                found.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    with contextlib.suppress(psutil.NoSuchProcess):
        found += psutil.Process(one.process.pid).children(recursive=True)
    return found
