"""The sides of a comparison, as the benchmark that compares them sees them: processes that run in turn.

All sides are started at once, since vLLM takes a minute. Each is then warmed up, and stopped (SIGSTOP) whenever it is
not its turn, since engines may poll while idle.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from http_load import READY, Clients, Workload

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 600.0
SHORT_WARM_UPS_ON_GPU = 3
"""Runs of an eighth of the tokens, before a whole one, before the first that is timed: vLLM's first runs on a new
machine are up to 40% slower, for kernels that it compiles when they are first used."""
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every side of one comparison is given."""

    model_dir: Path
    dtype: str
    work: Workload
    device: str
    threads: int
    gpu_memory_utilization: float
    num_clients: int
    vllm_python: str
    enforce_eager: bool
    logs: Path
    kv_cache_gb: float | None = None
    """On a GPU: of every side, which then measures no memory, so that all can start at once."""

    @property
    def warm_ups(self) -> list[int]:
        """New tokens of each request of the runs before the first that is timed."""
        whole = self.work.new_tokens
        return [whole] if self.device == "cpu" else [max(1, whole // 8)] * SHORT_WARM_UPS_ON_GPU + [whole]

    @property
    def max_model_len(self) -> int:
        return self.work.prompt_tokens + self.work.new_tokens + 8

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])),
        }

    def embedded(self) -> dict[str, Any]:
        """`InferenceConfig` of the embedded engine."""
        sizes = {"kv_cache_memory_gb": 2.0} if self.device == "cpu" else {"max_num_batched_tokens": 8192}  # vLLM's
        return self._config("embedded") | sizes

    def vllm_server(self) -> dict[str, Any]:
        """`InferenceConfig` of vLLM behind our server."""
        config = self._config("vllm")
        return config | {"model": config["model"] | {"enforce_eager": self.enforce_eager}}

    def vllm_arguments(self) -> dict[str, Any]:
        """What vLLM's own entry points take for the same."""
        arguments = {
            "model": str(self.model_dir),
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "max_num_seqs": self.work.concurrency,
            "max_model_len": self.max_model_len,
        }
        if self.device == "cpu":
            return arguments
        arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if self.kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(self.kv_cache_gb * 2**30)
        return arguments

    def _config(self, backend: str) -> dict[str, Any]:
        cache = {} if self.device == "cpu" or self.kv_cache_gb is None else {"kv_cache_memory_gb": self.kv_cache_gb}
        return cache | {
            "backend": backend,
            "device": self.device if backend == "embedded" else "auto",
            "model": {"name": str(self.model_dir), "dtype": self.dtype, "max_model_len": self.max_model_len},
            "max_num_seqs": self.work.concurrency,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }


class Side(Protocol):
    """One side under way, from the moment when it is made."""

    def warm_up(self) -> None:
        """Wait until it is ready, and run what is not timed. It is stopped afterwards."""

    def run(self, number: int) -> dict[str, float]:
        """One timed run with the prompts of that number."""

    def close(self) -> None:
        """End its processes."""


class _Process:
    """A process group with its log; stopped when it is not its turn."""

    def __init__(self, words: list[str], log: Path, environment: Mapping[str, str], **pipes: Any) -> None:
        self._log_file: IO[bytes] = log.open("wb")
        self.log = log
        self.process = subprocess.Popen(
            words, env=dict(environment), stderr=self._log_file, start_new_session=True, **pipes
        )

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def died(self) -> SystemExit:
        tail = self.log.read_text(errors="replace")[-3000:]
        return SystemExit(f"{' '.join(self.process.args[:4])} ended with code {self.process.poll()}:\n{tail}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
            self.signal(signal.SIGKILL)
        self.process.wait()
        self._log_file.close()


class Offline:
    """An engine through its Python API (`offline.py`)."""

    def __init__(self, name: str, setting: Setting) -> None:
        spec = {
            "side": name,
            "work": asdict(setting.work),
            "threads": setting.threads,
            "warm_ups": setting.warm_ups,
            "device": setting.device,
            "config": setting.embedded(),
            "vllm": setting.vllm_arguments() | {"skip_tokenizer_init": True, "disable_log_stats": True},
        }
        python = sys.executable if name == "embedded" else setting.vllm_python
        words = [python, str(HERE / "offline.py"), json.dumps(spec)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._group = _Process(words, setting.logs / f"offline-{name}.log", setting.environment, **pipes)

    def warm_up(self) -> None:
        self._line(READY, START_TIMEOUT_S)
        self._group.signal(signal.SIGSTOP)

    def run(self, number: int) -> dict[str, float]:
        self._group.signal(signal.SIGCONT)
        assert self._group.process.stdin is not None
        self._group.process.stdin.write(f"{number}\n")
        self._group.process.stdin.flush()
        result: dict[str, float] = json.loads(self._line("{", RUN_TIMEOUT_S))
        self._group.signal(signal.SIGSTOP)
        return result

    def close(self) -> None:
        self._group.close()

    def _line(self, beginning: str, timeout: float) -> str:
        """The next line that begins so. A side that hangs is killed, which ends its output."""
        assert self._group.process.stdout is not None
        guard = threading.Timer(timeout, self._group.signal, [signal.SIGKILL])
        guard.start()
        try:
            for line in self._group.process.stdout:
                if line.startswith(beginning):
                    return str(line)
        finally:
            guard.cancel()
        self._group.process.wait()
        raise self._group.died()


class Server:
    """A server process on a port of its own. `stock` is vLLM's own server, without anything of ours."""

    def __init__(
        self, name: str, setting: Setting, extra: Mapping[str, Any] | None = None, *, waits: bool = True
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(setting.model_dir)
        words = self._stock(setting, port) if name == "stock" else self._ours(name, setting, port, extra or {})
        log = setting.logs / f"http-{name}.log"
        self.group = _Process(words, log, setting.environment, stdout=subprocess.DEVNULL)
        if waits:
            self.await_ready()

    def _ours(self, name: str, setting: Setting, port: int, extra: Mapping[str, Any]) -> list[str]:
        import tomli_w  # noqa: PLC0415 (vLLM's own server needs none)

        config = (setting.embedded() if name == "embedded" else setting.vllm_server()) | dict(extra)
        config |= {"server": {"port": port}, "output_dir": str(setting.logs / name)}
        file = Path(tempfile.mkdtemp(dir=setting.logs)) / "infer.toml"
        file.write_text(tomli_w.dumps(config), encoding="utf-8")
        python = sys.executable if name == "embedded" else setting.vllm_python
        return [python, "-m", "prime_rl.cli", "inference", "@", str(file)]

    def _stock(self, setting: Setting, port: int) -> list[str]:
        words = [setting.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        for key, value in (setting.vllm_arguments() | {"port": port}).items():
            flag = f"--{key.replace('_', '-')}"
            words += [flag] if value is True else [] if value is False else [flag, str(value)]
        return words

    def await_ready(self) -> None:
        """Return when it answers. Raises: SystemExit when it ends or takes too long; it is then gone."""
        try:
            self._await_health()
        except BaseException:
            self.group.close()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self.group.process.poll() is not None:
                raise self.group.died()
            with contextlib.suppress(OSError), opener.open(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise SystemExit(f"{self.url} is not ready after {START_TIMEOUT_S} s; see {self.group.log}")

    def close(self) -> None:
        self.group.close()


class Http:
    """A server and its clients."""

    def __init__(self, name: str, setting: Setting) -> None:
        self._setting = setting
        self._server = Server(name, setting, waits=False)
        self._clients: Clients | None = None

    def warm_up(self) -> None:
        server, setting = self._server, self._setting
        server.await_ready()
        self._clients = Clients(server.url, server.model, setting.work, num_processes=setting.num_clients)
        for number, new_tokens in enumerate(setting.warm_ups):
            self._clients.run(-1 - number, new_tokens)
        server.group.signal(signal.SIGSTOP)

    def run(self, number: int) -> dict[str, float]:
        assert self._clients is not None
        self._server.group.signal(signal.SIGCONT)
        try:
            return self._clients.run(number)
        finally:
            self._server.group.signal(signal.SIGSTOP)

    def close(self) -> None:
        if self._clients is not None:
            self._clients.close()
        self._server.close()
