"""Weight updates under load: from the trainer's `publish` to the first token of the new version.

    python benchmarks/update.py --model 3.3m --backend embedded                                   # CPU, files
    python benchmarks/update.py --model 0.6b --backend vllm --via filesystem nccl                 # two GPUs

The server runs on the first GPU (or the CPU), a publisher as the trainer has it in a process of its own on the last,
and the orchestrator's relay of weights in this one. A load of requests without end goes on beside them; a prober that
asks for one token at a time notices the new version. No request may fail, and the versions of every answer must add up.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from http_load import READY, Answer, Connection, Workload, generate_body
from inference import machine, num_gpus
from models import DTYPES, SHAPES, make_model
from sides import RUN_TIMEOUT_S, START_TIMEOUT_S, Server, Setting

from prime_rl.config.load import load as load_config
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.monitors.events import EventLog
from prime_rl.monitors.tables import aligned
from prime_rl.orchestrator.orchestrator import build_policy
from prime_rl.paths import RunPaths

SETTLE_S = 3.0
SAMPLE_S = 0.1
PROBE_S = 0.002
WINDOW = 3
"""Samples of which the slowest moment is made: a single one is too short to tell a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update took, in seconds from the call of `publish`, and what it cost."""

    published_s: float
    """Until `publish` returned: the trainer goes on."""
    served_s: float
    """Until all servers had answered with the new weights."""
    first_token_s: float
    """Until a client held an answer that the new weights had sampled."""
    slowest: float
    """Share of the usual tokens/s that was left in the slowest moments."""
    lost_s: float
    """Seconds of generation at the usual speed that are missing."""


def rates(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """`(from, to, tokens/s)` between each two samples `(time, tokens so far)`."""
    return [(t0, t1, (n1 - n0) / (t1 - t0)) for (t0, n0), (t1, n1) in pairwise(samples) if t1 > t0]


def cost(samples: Sequence[tuple[float, float]], started: float, ended: float) -> tuple[float, float]:
    """Share of tokens/s in the slowest moments from `started` to `ended`, and seconds lost there, against before."""
    before = [(t1 - t0, rate) for t0, t1, rate in rates(samples) if started - SETTLE_S < t0 and t1 <= started]
    usual = sum(width * rate for width, rate in before) / sum(width for width, _ in before)
    during = [(t1 - t0, rate) for t0, t1, rate in rates(samples) if t1 > started and t0 < ended]
    windows = [during[i : i + WINDOW] for i in range(max(1, len(during) - WINDOW + 1))]
    slowest = min(sum(w * r for w, r in window) / sum(w for w, _ in window) for window in windows)
    lost = sum(width * (usual - rate) for width, rate in during) / usual
    return slowest / usual, lost


# -- the trainer's side ------------------------------------------------------------------------------------------------


def publish_on_demand(spec: dict[str, Any]) -> None:
    """The publisher's process: for each step read, change the weights and publish them as the trainer would.

    Printed: READY, then the times of each publication as a line of JSON. `spec["added"]`: what is added to the first
    parameter, twice that to the second, and so on.
    """
    import torch  # noqa: PLC0415 (the other processes need none)

    from prime_rl.models.hf import hf_tensors, load_decoder  # noqa: PLC0415
    from prime_rl.trainer.publish.background import BackgroundWriter  # noqa: PLC0415
    from prime_rl.trainer.publish.gathering import StoredTensors  # noqa: PLC0415
    from prime_rl.trainer.publish.publishers import BroadcastPublisher, Publisher, WeightPublisher  # noqa: PLC0415
    from prime_rl.trainer.publish.retention import Retention  # noqa: PLC0415
    from prime_rl.trainer.ranks import ALONE  # noqa: PLC0415
    from prime_rl.transport.nccl import NcclSender  # noqa: PLC0415

    device = torch.device(spec["device"])
    dtype = getattr(torch, spec["dtype"])
    model_dir, paths = Path(spec["model_dir"]), RunPaths(Path(spec["output_dir"]))
    model = load_decoder(str(model_dir), device=device, dtype=torch.float32)
    stored = StoredTensors(lambda: dict(hf_tensors(model)), dtype, ALONE)
    retention = Retention(root=paths.weights, max_steps=spec["max_steps"], interval=None, keep_last=2)
    files = WeightPublisher(
        tensors=stored.gathering,
        writer=BackgroundWriter(),
        retention=retention,
        assets=model_dir,
        tokenizer=model_dir,
    )
    publisher: Publisher = files
    if spec["via"] == "nccl":
        sender = NcclSender(host="127.0.0.1", port=spec["port"], world_size=2, device=device, timeout=START_TIMEOUT_S)
        publisher = BroadcastPublisher(
            stored=stored, sender=sender, root=paths.broadcasts, timeout=RUN_TIMEOUT_S, files=files
        )
    print(READY, flush=True)
    for line in sys.stdin:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters(), 1):
                parameter.mul_(1.0005).add_(number * spec["added"])
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.monotonic()
        publisher.publish(int(line))
        print(json.dumps({"started": started, "ended": time.monotonic()}), flush=True)


class Publisher:
    """The publisher's process as the benchmark sees it."""

    def __init__(self, spec: dict[str, Any], gpu: str) -> None:
        words = [sys.executable, str(Path(__file__).resolve()), "--publisher", json.dumps(spec)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )
        self._line(READY)

    def publish(self, step: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self._line("{"))
        return times

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(f"the publisher ended with code {self._process.wait()}")


# -- the orchestrator's and the clients' side --------------------------------------------------------------------------


@asynccontextmanager
async def relay(server: Server, output_dir: Path, via: str, port: int) -> AsyncIterator[dict[int, float]]:
    """The orchestrator's relay of weights at work; yields when each version was served by all servers."""
    argv = ["--client.base-url", f"{server.url}/v1", "--model.name", server.model, "--output-dir", str(output_dir)]
    if via == "nccl":
        argv += ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", str(port)]
    config, paths = load_config(OrchestratorConfig, argv, {}), RunPaths(output_dir)
    served: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog.opened(paths.events))
        clients = await stack.enter_async_context(open_clients(config.client))
        policy = build_policy(config, clients, paths, events)
        await policy.start(START_TIMEOUT_S)
        watching = asyncio.gather(
            policy.watch(lambda version: served.__setitem__(version, time.monotonic())), policy.fleet.watch()
        )
        try:
            yield served
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


class Probe:
    """Asks for one token at a time; when each version was first seen, and how many tokens the server has made."""

    def __init__(self, server: Server, vocab: int) -> None:
        self._server = server
        self._vocab = vocab
        self.first_seen: dict[int, float] = {}
        self.samples: list[tuple[float, float]] = []

    async def look(self) -> None:
        """Returns never."""
        connection = await Connection.open(self._server.url)
        body = generate_body(self._server.model, [1, 2, 3], new_tokens=1)
        while True:
            response = await connection.post("/inference/v1/generate", body)
            assert response.status == 200, response.body
            (((version, _),),) = msgspec.json.decode(response.body, type=Answer).versions or []
            self.first_seen.setdefault(version, response.at)
            await asyncio.sleep(PROBE_S)

    async def count(self) -> None:
        """Returns never."""
        connection = await Connection.open(self._server.url)
        while True:
            response = await connection.get("/metrics")
            found = re.findall(rb"^vllm:generation_tokens_total\S* (\S+)", response.body, re.MULTILINE)
            self.samples.append((response.at, sum(float(value) for value in found)))
            await asyncio.sleep(SAMPLE_S)

    async def watch(self) -> None:
        """Both at the same time. Returns never."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.look())
            group.create_task(self.count())


async def wait_seen(probe: Probe, version: int, looking: "asyncio.Task[None]") -> float:
    """When the version was first seen. Raises: TimeoutError, and what the prober raised."""
    async with asyncio.timeout(RUN_TIMEOUT_S / 4):
        while version not in probe.first_seen:
            if looking.done():
                looking.result()
            await asyncio.sleep(PROBE_S)
    return probe.first_seen[version]


async def measure(server: Server, setting: Setting, via: str, args: argparse.Namespace) -> tuple[list[Update], str]:
    """A few updates under load, and a line about the load."""
    output_dir, port = setting.logs / f"run-{via}", args.port
    spec = {"via": via, "port": port, "device": setting.device, "dtype": setting.dtype}
    spec |= {"model_dir": str(setting.model_dir), "output_dir": str(output_dir), "max_steps": None, "added": 0.0}
    publisher = await asyncio.to_thread(Publisher, spec, _last_gpu())
    probe = Probe(server, setting.work.vocab)
    seconds = (args.updates + 2) * 2 * SETTLE_S
    try:
        async with relay(server, output_dir, via, port) as served:
            load = await asyncio.create_subprocess_exec(
                *_load_words(server, setting.work, seconds), stdout=asyncio.subprocess.PIPE
            )
            looking = asyncio.create_task(probe.watch())
            updates = await _updates(publisher, probe, served, looking, args.updates)
            looking.cancel()
            async with asyncio.timeout(RUN_TIMEOUT_S):
                out, _ = await load.communicate()
            assert load.returncode == 0, "requests failed: see above"
    finally:
        publisher.close()
    told = json.loads(out)
    return updates, f"{via}: {told['requests']} requests, none failed; tokens by version {told['versions']}"


def _last_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus())))
    return visible.rpartition(",")[2]


async def _updates(
    publisher: Publisher, probe: Probe, served: dict[int, float], looking: "asyncio.Task[None]", number: int
) -> list[Update]:
    await asyncio.sleep(2 * SETTLE_S)
    raw = []
    for version in range(1, number + 1):
        publishing = asyncio.create_task(asyncio.to_thread(publisher.publish, version))
        seen = await wait_seen(probe, version, looking)
        raw.append((await publishing, seen, version))
        await asyncio.sleep(SETTLE_S)
    updates = []
    for times, seen, version in raw:
        slowest, lost = cost(probe.samples, times["started"], seen + 1.0)
        update = Update(
            published_s=times["ended"] - times["started"],
            served_s=served[version] - times["started"],
            first_token_s=seen - times["started"],
            slowest=slowest,
            lost_s=lost,
        )
        print(f"weights {version}: {update}", file=sys.stderr, flush=True)
        updates.append(update)
    return updates


def _load_words(server: Server, work: Workload, seconds: float) -> list[str]:
    words = [sys.executable, str(Path(__file__).parent / "http_load.py"), "--url", server.url, "--model", server.model]
    for name in ("vocab", "concurrency", "prompt_tokens", "new_tokens"):
        words += [f"--{name.replace('_', '-')}", str(getattr(work, name))]
    return [*words, "--seconds", str(seconds)]


def table(results: dict[str, list[Update]]) -> str:
    """A line an update."""
    lines = [["seconds from publish to", "trainer goes on", "all serve", "first token", "slowest tok/s", "lost s"]]
    for via, updates in results.items():
        for number, update in enumerate(updates, start=1):
            times = (update.published_s, update.served_s, update.first_token_s)
            shown = [f"{value:.3f}" for value in times]
            lines.append([f"{via} {number}", *shown, f"{update.slowest:.0%}", f"{update.lost_s:.2f}"])
    return aligned(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="3.3m")
    parser.add_argument("--backend", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--via", nargs="+", choices=["filesystem", "nccl"], default=["filesystem"])
    parser.add_argument("--kv", choices=["keep", "recompute"], default="keep", help="inference.kv_cache_on_update")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 on a GPU")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--port", type=int, default=29611, help="where NCCL's group meets")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--publisher", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.publisher:
        publish_on_demand(args.publisher)
        return
    device = "cuda" if num_gpus() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        logs = args.logs or directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        make_model(args.model, directory / "model", dtype)
        work = Workload(
            requests=0,
            concurrency=args.concurrency,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            vocab=SHAPES[args.model].vocab,
        )
        setting = Setting(
            model_dir=directory / "model",
            dtype=dtype,
            work=replace(work, concurrency=args.concurrency + 8),  # room for the prober
            device=device,
            threads=2,
            gpu_memory_utilization=args.gpu_memory_utilization,
            num_clients=1,
            vllm_python=args.vllm_python,
            enforce_eager=device == "cpu",
            logs=logs,
        )
        results, notes = {}, []
        for via in args.via:
            server = Server(args.backend, setting, {"kv_cache_on_update": args.kv})
            try:
                results[via], note = asyncio.run(measure(server, replace(setting, work=work), via, args))
                notes.append(note)
            finally:
                server.close()
    print(f"{args.model} {dtype}, {args.backend}, {args.concurrency} requests at a time, KV {args.kv}")
    print("\n".join(notes))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
