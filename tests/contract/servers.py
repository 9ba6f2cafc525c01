"""The servers under test: the real `inference` command with a real TOML file, one process for each.

To add a backend, add a `Kind` to `KINDS`; every test of the suite then runs against it too.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import tomli_w

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("CONTRACT_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
"""The interpreter that has vLLM beside prime-rl. vLLM pins what it needs, so it has an environment of its own."""
DEVICE = os.environ.get("CONTRACT_DEVICE", "cpu")
DTYPE = os.environ.get("CONTRACT_DTYPE", "float32")
"""Of weights and computation. The tolerances of the tests are those of float32."""
TOLERANCE = {"cpu": 2e-5, "cuda": 1e-4}[DEVICE]
"""Of logprobs in float32 beside those computed in float64 here. A GPU's kernels sum in orders of their own and take the
hardware's approximate exponentials; products in TF32, which are no float32, are 0.007 to 0.02 off and must be seen."""
GPU = {"gpu_memory_utilization": 0.2} if DEVICE == "cuda" else {}
"""Two servers at a time share the GPU, and vLLM wants its share free when it starts, however small its cache is."""
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
START_S = 400.0
"""vLLM's three processes import it one after the other, 50 s of one core, and other tests may be running."""
STOP_S = 20.0


@dataclass(frozen=True)
class Tolerance:
    """How far a request's logprobs may be off: any one of them, and all in the mean."""

    most: float
    mean: float

    def assert_near(self, found: Sequence[float], expected: Sequence[float]) -> None:
        """Of logprobs of the same tokens."""
        off = [abs(one - other) for one, other in zip(found, expected, strict=True)]
        assert max(off) <= self.most, f"a token is {max(off):.3g} off: {found} beside {expected}"
        assert sum(off) <= self.mean * len(off), f"{sum(off) / len(off):.3g} off in the mean: {found} beside {expected}"


@dataclass(frozen=True)
class Kind:
    """A backend: how its server is started, and what this suite sets for it alone."""

    name: str
    python: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    adapter_dtype: str = DTYPE
    """Of the server that serves adapters."""

    @property
    def adapter_tolerance(self) -> Tolerance:
        """Of logprobs of the server that serves adapters.

        In bfloat16, transformers is up to 0.28 (mean 0.03) off the reference with these adapters, over all tokens of
        the vocabulary; a model without the adapter, or with older weights, is more than 1 off in the mean.
        """
        near = Tolerance(2.5 * TOLERANCE, 2.5 * TOLERANCE)
        return Tolerance(most=1.0, mean=0.15) if self.adapter_dtype == "bfloat16" else near


KINDS = {
    kind.name: kind
    for kind in (
        Kind("embedded", Path(sys.executable)),
        # Its kernels for adapters on a GPU take 16-bit weights only.
        Kind("vllm", VLLM_PYTHON, adapter_dtype="bfloat16" if DEVICE == "cuda" else DTYPE),
    )
}


def config_of(kind: Kind, model: Path, output_dir: Path, port: int, dtype: str, **keys: Any) -> dict[str, Any]:
    """The configuration of a server; `keys` are those in which the servers of the suite differ."""
    return {
        "backend": kind.name,
        "device": DEVICE,
        "output_dir": str(output_dir),
        "kv_cache_memory_gb": 0.25,
        "max_num_seqs": MAX_NUM_SEQS,
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "name": str(model),
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "enforce_eager": DEVICE == "cpu",
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
        },
        **GPU,
        **kind.config,
        **keys,
    }


@dataclass
class Server:
    """A process that serves, or is about to. What it prints goes to a file."""

    kind: Kind
    model: Path
    key: str | None
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def await_health(self) -> "Server":
        """Return when it answers."""
        deadline = time.monotonic() + START_S
        with httpx.Client(base_url=self.url, timeout=5) as client:
            while True:
                assert self.process.poll() is None, f"the server ended:\n{self.printed[-6000:]}"
                assert time.monotonic() < deadline, f"no answer from /health in {START_S} s:\n{self.printed[-6000:]}"
                try:
                    if client.get("/health").status_code == httpx.codes.OK:
                        return self
                except httpx.TransportError:
                    pass
                time.sleep(0.1)

    def ended(self, timeout: float = STOP_S) -> str:
        """All that it printed, once it has ended."""
        self.process.wait(timeout)
        return self.printed

    def stop(self) -> None:
        """End it and whatever it started; it gets time to do so itself."""
        if self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(family, timeout=STOP_S)
        for child in alive:
            child.kill()


def start(
    kind: Kind, model: Path, directory: Path, *, port: int | None = None, dtype: str = DTYPE, **keys: Any
) -> Server:
    """Start the command; it may still be loading, or about to fail, when this returns."""
    if not kind.python.exists():
        raise FileNotFoundError(
            f"the {kind.name} backend is tested with the interpreter {kind.python}, which is not there: run "
            "`make vllm-venv`, or set CONTRACT_VLLM_PYTHON to one that has vLLM and prime-rl"
        )
    port = port or free_port()
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "inference.toml"
    file.write_text(tomli_w.dumps(config_of(kind, model, directory / "outputs", port, dtype, **keys)))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | kind.environment  # threads: the model is tiny
    log = directory / "printed"
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [str(kind.python), "-m", "prime_rl.cli", "inference", "@", str(file)],
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            preexec_fn=_hear_ctrl_c,
        )
    return Server(kind, model, keys.get("api_key"), f"http://127.0.0.1:{port}", process, log)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _hear_ctrl_c() -> None:
    """A test session in the background of a shell ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
