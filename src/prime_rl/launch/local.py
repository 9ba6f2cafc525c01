"""Runs a plan on this machine.

Each process runs in a session of its own, so that a Ctrl-C reaches the launcher alone, which then stops all of them in
order, the trainer once the weights that it is writing are there; a second Ctrl-C ends all of them at once. When one
fails for good (`supervise`), the rest are stopped and the error names it, with the reason it gave and its last lines. A
launcher that is killed leaves nothing behind: every process watches it (`lifeline`).
"""

import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.launch.machine import Machine, ProcessSpec
from prime_rl.launch.processes import stop
from prime_rl.launch.servers import ROUTER
from prime_rl.launch.supervise import Supervision
from prime_rl.paths import RunPaths

POLL_S = 0.2
PROBE_TIMEOUT_S = 2.0


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


class Stopped(BaseException):
    """SIGTERM reached the launcher."""


def run_local(specs: Sequence[ProcessSpec], output_dir: Path, on_tick: Callable[[], None] = lambda: None) -> None:
    """Start `specs`, call `on_tick` a few times a second, and return when every process that ends by itself has.

    Raises ProcessFailed when any of them fails, and when a service ends before the others are done. One of several
    servers may: while another one runs, that is an event and not the end. Whatever way this function is left, nothing
    that it started is left running.
    """
    paths = RunPaths(output_dir)
    oversee(Supervision(specs, paths), paths, on_tick)


def oversee(supervision: Supervision, paths: RunPaths, on_tick: Callable[[], None]) -> None:
    """As `run_local`, with whatever `supervision` does about processes that fail."""
    hurry = threading.Event()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        supervision.start()
        while not supervision.watch():
            time.sleep(POLL_S)
            on_tick()
        on_tick()
    finally:
        for number in handlers:
            signal.signal(number, lambda *_: hurry.set())
        stop(supervision.running, paths, hurry)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped
