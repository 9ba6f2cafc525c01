"""Real runs of `rl`, one with faults in it and one without being the same but for the faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader
from tests.chaos.draws import FaultLog, Stream
from tests.chaos.proxy import running_proxy
from tests.integration.conftest import ROOT, command

IN_ENVIRONMENT: Final = {"exception": 0.05, "await": 0.025, "block": 0.025, "kill": 0.05, "nan": 0.05}
"""Share of rollouts; the two kinds of hanging are one kind of fault."""
AT_SERVER: Final = {"malformed": 0.05, "error": 0.05, "lost": 0.05}
MAX_STEPS: Final = 20
AT_ONCE: Final = 32
"""Rollouts in flight at most, as `game.toml` has it."""
LIMIT_S: Final = 600
"""Of one run, on a machine that has other work too."""
NUM_TURNS: Final = 4
GAME: Final = {"highest": 15, "min_numbers": 12, "max_turns": NUM_TURNS}
ENV: Final = "game"
PACKAGES: Final = ROOT / "tests" / "chaos" / "packages"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One that was trained on."""

    ids: list[int]
    places: list[int]
    """Of the tokens in the loss, P of them."""
    logprobs: list[float]
    """[P]"""
    advantages: list[float]
    """[P]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong in a run. Rates by kind; scripts come first and are not drawn."""

    in_environment: Mapping[str, float] = field(default_factory=dict)
    at_server: Mapping[str, float] = field(default_factory=dict)
    environment_script: Sequence[str] = ()
    server_script: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is over, as its files tell of it."""

    directory: Path
    code: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, directory: Path) -> Outcome:
        """The outcome of the run in `directory`."""
        return cls(directory=directory, **json.loads((directory / "result.json").read_text()))

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.directory / "rl")

    @property
    def said(self) -> str:
        """The orchestrator's log."""
        file = self.paths.log("orchestrator")
        return file.read_text() if file.exists() else ""

    @property
    def metrics(self) -> list[Row]:
        return read_metrics(self.paths.metrics("orchestrator"))

    @property
    def rewards(self) -> list[float]:
        return [row["reward/mean"] for row in self.metrics]

    @property
    def counted(self) -> tuple[int, Counter[str]]:
        """How many rollouts were dispatched, and how they ended, as the last line of the orchestrator's log has it."""
        last = re.findall(r"\d+ batches; (\d+) rollouts: (.*)", self.said)[-1]
        return int(last[0]), Counter({end: int(count) for count, end in re.findall(r"(\d+) ([^,]+)", last[1])})

    def traces(self) -> list[Row]:
        """Every rollout that ended."""
        files = self.paths.traces.glob(f"step_*/{ENV}/results.jsonl")
        return [
            {"step": int(file.parts[-3].removeprefix("step_")), **json.loads(line)}
            for file in files
            for line in file.read_text().splitlines()
        ]

    def trained_on(self, step: int) -> list[Trained]:
        """The sequences of a batch."""
        batch = BatchReader(self.paths.rollouts).read(step, 1)
        sequences = []
        for row in batch.micro_batches:
            start = 0
            for length in row.seq_lens:
                tokens = slice(start, start + int(length))
                places = [index for index, is_trained in enumerate(row.loss_mask[tokens]) if is_trained]
                sequences.append(
                    Trained(
                        ids=row.input_ids[tokens].tolist(),
                        places=places,
                        logprobs=row.inference_logprobs[tokens][places].tolist(),
                        advantages=row.advantages[tokens][places].tolist(),
                    )
                )
                start += int(length)
        return sequences

    def readable(self, step: int) -> list[Row]:
        """The rollouts of a batch as they are written beside it."""
        lines = (step_dir(self.paths.rollouts, step) / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def noted(self) -> list[Row]:
        """The lines of all injectors' logs."""
        files = sorted((self.directory / "faults").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_rl(
    directory: Path, model: Path, *, seed: int, ports: tuple[int, int], faults: Faults, flags: Sequence[str] = ()
) -> Outcome:
    """A server, a proxy before it, and `rl`; to its end, whatever that is. `ports`: of server and proxy."""
    logs = directory / "faults"
    logs.mkdir(parents=True)
    stream = Stream(f"{seed}/proxy", rates=faults.at_server, script=faults.server_script, num_turns=NUM_TURNS)
    server = _start(
        *("inference", "--model.name", str(model), "--model.max-model-len", "256", "--device", "cpu"),
        *("--server.port", str(ports[0]), "--output-dir", str(directory / "server")),
    )
    try:
        log = FaultLog(logs / "proxy.jsonl")
        with running_proxy(port=ports[1], target_port=ports[0], stream=stream, log=log):
            started = time.monotonic()
            rl = _start(*_words(directory, model, seed, ports, faults), *flags)
            try:
                rl.wait(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                pass  # its end by a signal tells
            finally:
                _end(rl)
            result = {"code": rl.returncode, "seconds": round(time.monotonic() - started, 1)}
            (directory / "result.json").write_text(json.dumps(result))
            return Outcome.read(directory)
    finally:
        _end(server)


def _words(directory: Path, model: Path, seed: int, ports: tuple[int, int], faults: Faults) -> list[str]:
    args = {
        "environment": "higher-lower",
        "args": GAME,
        "directory": str(directory / "faults"),
        "seed": seed,
        "rates": dict(faults.in_environment),
        "script": list(faults.environment_script),
        "num_turns": NUM_TURNS,
    }
    client = "--orchestrator.client"
    return [
        *("rl", "@", "tests/chaos/game.toml", "--model.name", str(model), "--output-dir", str(directory / "rl")),
        *("--max-steps", str(MAX_STEPS), "--seed", str(seed), f"{client}.base-url", f"http://127.0.0.1:{ports[1]}/v1"),
        *(f"{client}.admin-base-url", f"http://127.0.0.1:{ports[0]}/v1"),
        *("--orchestrator.env", json.dumps([{"id": "faulty-env", "name": ENV, "args": args}])),
    ]


def _start(*words: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(PACKAGES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(*words), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
