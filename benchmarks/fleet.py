"""`kill -9` of one of two servers under load, and its return: what is lost (nothing), and how fast all is as before.

    python benchmarks/fleet.py                          # vLLM or the embedded engine, GPUs or CPU: what there is
    python benchmarks/fleet.py --backend embedded --model 30m --concurrency 64

Two servers, the orchestrator's fleet over them, the environment workers' failover under every rollout, and a publisher
of new weights every few seconds. Rollouts without end: `--concurrency` at a time, each a request. None may be lost, and
no token may be of weights older than those that were served when its rollout was dispatched; else that is an error.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from http_load import Answer, generate_body
from inference import machine, num_gpus
from models import SHAPES, make_model
from sides import START_TIMEOUT_S
from update import Publisher

from prime_rl.config.load import load as load_config
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.environments.verifiers.failover import Failover, ManyPools, Route
from prime_rl.monitors.events import EventLog
from prime_rl.monitors.tables import aligned
from prime_rl.orchestrator.orchestrator import build_policy
from prime_rl.orchestrator.policy import Policy
from prime_rl.paths import RunPaths

PROMPT_TOKENS = 64
WINDOW_S = 3.0
"""What "as before" is judged by."""
AS_BEFORE = 0.9
RETURN_LIMIT_S = 30.0
SESSION_HEADER = "X-Session-ID"


class Server:
    """A server of two on a port of its own, started again after it was killed."""

    def __init__(self, index: int, model: Path, args: argparse.Namespace, logs: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        gpus = num_gpus()
        self._log = logs / f"server-{index}.log"
        self._words = [sys.executable, "-m", "prime_rl.cli", "inference", "--backend", args.backend]
        self._words += ["--model.name", str(model), "--model.max-model-len", str(PROMPT_TOKENS + args.new_tokens + 8)]
        self._words += ["--server.port", str(self.port), "--max-num-seqs", str(args.concurrency)]
        self._words += ["--output-dir", str(logs / f"server-{index}")]
        if gpus:  # two on one GPU share it with the publisher
            self._words += ["--gpu-memory-utilization", "0.8" if gpus > 1 else "0.35"]
        else:
            self._words += ["--kv-cache-memory-gb", "0.5", "--model.dtype", "float32", "--model.enforce-eager"]
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} if not gpus else {}
        self._env = os.environ | threads | {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        if gpus:
            self._env["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._words, env=self._env, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        """As `kill -9` of the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Load:
    """Rollouts without end over a fleet; what became of each."""

    policy: Policy
    model: str
    new_tokens: int
    vocab: int
    done: list[tuple[float, int]] = field(default_factory=list)
    """When a rollout ended, and its tokens."""
    lost: list[str] = field(default_factory=list)
    num_stale: int = 0
    num_failovers: int = 0
    by_version: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        fleet = self.policy.fleet
        self._routes: dict[str, Route] = {}
        addresses = [server.name for server in fleet.servers]
        self._transport = Failover(
            ManyPools(),
            addresses,
            retry_s=120.0,
            route_of=lambda request: self._routes[request.headers[SESSION_HEADER]],
        )
        self._url = f"{addresses[0].removesuffix('/v1')}/inference/v1/generate"
        self._came = asyncio.Event()
        fleet.on_change = self._on_servers

    def _on_servers(self) -> None:
        self._transport.avoid(self.policy.fleet.down)
        self._came.set()

    async def run(self, concurrency: int) -> None:
        """Returns never."""
        async with httpx.AsyncClient(transport=self._transport, timeout=600.0) as client, asyncio.TaskGroup() as group:
            for index in range(concurrency):
                group.create_task(self._go_on(client, index))

    async def _go_on(self, client: httpx.AsyncClient, index: int) -> None:
        rng = random.Random(index)
        rollout = index
        while True:
            while not self.policy.fleet.may_assign(self.policy.version):
                self._came.clear()
                await self._came.wait()
            await self._roll(client, rollout, rng.choices(range(1, self.vocab), k=PROMPT_TOKENS))
            rollout += 1_000_000

    async def _roll(self, client: httpx.AsyncClient, rollout: int, prompt: list[int]) -> None:
        version, session = self.policy.version, str(rollout)
        route = Route(servers=self.policy.fleet.assign(rollout, rollout, version), min_version=version)
        self._routes[session] = route
        try:
            body = generate_body(self.model, prompt, new_tokens=self.new_tokens)
            headers = {SESSION_HEADER: session, "Content-Type": "application/json"}
            response = await client.post(self._url, content=body, headers=headers)
            response.raise_for_status()
            (runs,) = msgspec.json.decode(response.content, type=Answer).versions or []
            assert sum(count for _, count in runs) == self.new_tokens, "a part of an answer was taken for the whole"
            self.num_stale += min(sampled for sampled, _ in runs) < version
            self.by_version.update(dict(runs))
            self.done.append((time.monotonic(), self.new_tokens))
        except httpx.HTTPError as error:
            self.lost.append(f"{type(error).__name__}: {error}")
        finally:
            self.num_failovers += route.num_failovers
            self.policy.fleet.release(rollout)
            del self._routes[session]

    def rate(self, start: float, end: float) -> float:
        """Tokens/s of the rollouts that ended in between."""
        return sum(tokens for at, tokens in self.done if start < at <= end) / (end - start)


@asynccontextmanager
async def policy_over(servers: Sequence[Server], model: Path, output_dir: Path) -> AsyncIterator[Policy]:
    """The orchestrator's servers and weights at work, its event lines on standard error."""
    addresses = ",".join(f"http://127.0.0.1:{server.port}/v1" for server in servers)
    argv = ["--client.base-url", addresses, "--model.name", str(model), "--output-dir", str(output_dir)]
    config, paths = load_config(OrchestratorConfig, argv, {}), RunPaths(output_dir)
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog.opened(paths.events))
        clients = await stack.enter_async_context(open_clients(config.client))
        for client in clients:
            await client.wait_ready(START_TIMEOUT_S)
        policy = build_policy(config, clients, paths, events)
        await policy.start(START_TIMEOUT_S)
        yield policy


async def until_up(policy: Policy, number: int, limit_s: float) -> float:
    """When that many servers were up."""
    async with asyncio.timeout(limit_s):
        while policy.fleet.num_up != number:  # noqa: ASYNC110 (it is watched by a person's patience, not a loop's)
            await asyncio.sleep(0.02)
    return time.monotonic()


async def publish_now_and_then(publisher: Publisher, every_s: float) -> None:
    """New weights, every few seconds. Returns never."""
    step = 0
    while True:
        await asyncio.sleep(every_s)
        step += 1
        await asyncio.to_thread(publisher.publish, step)


async def measure(args: argparse.Namespace, model: Path, output_dir: Path, servers: Sequence[Server]) -> str:
    """The report. Raises: SystemExit when a rollout was lost, a token stale, or the return too slow."""
    device = "cuda" if num_gpus() else "cpu"
    dtype = "bfloat16" if num_gpus() else "float32"
    spec: dict[str, Any] = {"via": "filesystem", "port": 0, "device": device, "dtype": dtype}
    spec |= {"model_dir": str(model), "output_dir": str(output_dir)}
    publisher = await asyncio.to_thread(Publisher, spec, str(max(0, num_gpus() - 1)))
    try:
        async with policy_over(servers, model, output_dir) as policy:
            load = Load(policy, str(model), args.new_tokens, SHAPES[args.model].vocab)
            tasks = [
                asyncio.create_task(work)
                for work in (
                    policy.fleet.watch(), policy.watch(lambda version: None), load.run(args.concurrency),
                    publish_now_and_then(publisher, args.publish_every),
                )
            ]  # fmt: skip
            story = asyncio.create_task(kill_and_return(args, policy, load, servers[1]))
            done, _ = await asyncio.wait({story, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()  # what failed says so
            return story.result()
    finally:
        publisher.close()


async def kill_and_return(args: argparse.Namespace, policy: Policy, load: Load, victim: Server) -> str:
    """The story, as a table."""
    await asyncio.sleep(args.phase)  # warm
    began = time.monotonic()
    await asyncio.sleep(args.phase)
    killed, version_then = time.monotonic(), policy.version
    before = load.rate(began, killed)
    victim.kill()
    noticed = await until_up(policy, 1, 30.0)
    await asyncio.sleep(args.phase)
    started = time.monotonic()
    during = load.rate(killed, started)
    victim.start()
    up = await until_up(policy, 2, START_TIMEOUT_S)
    returned_with = policy.version
    restored = None
    while time.monotonic() < up + max(args.phase, RETURN_LIMIT_S) and restored is None:
        await asyncio.sleep(0.5)
        now = time.monotonic()
        if now >= up + WINDOW_S and load.rate(now - WINDOW_S, now) >= AS_BEFORE * before:
            restored = now - up
    settled = time.monotonic()
    await asyncio.sleep(args.phase)
    after = load.rate(settled, time.monotonic())
    rows = [
        ["", "tokens/s", "of before"],
        ["before", f"{before:,.0f}", ""],
        ["one server", f"{during:,.0f}", f"{during / before:.2f}"],
        ["after its return", f"{after:,.0f}", f"{after / before:.2f}"],
    ]
    restored_after = "never" if restored is None else f"{restored:.1f} s"
    report = (
        f"{aligned(rows)}\n\n"
        f"noticed after {noticed - killed:.2f} s; process start to up (weights {returned_with}, killed at "
        f"{version_then}): {up - started:.1f} s; from up to {AS_BEFORE:.0%} of before over {WINDOW_S:g} s: "
        f"{restored_after}\n"
        f"{len(load.done)} rollouts, {len(load.lost)} lost, {load.num_failovers} requests sent again, "
        f"{load.num_stale} with a token older than its dispatch; weights {min(load.by_version)} to "
        f"{max(load.by_version)}, update {policy.update_s:.2f} s"
    )
    if load.lost or load.num_stale or restored is None or restored > RETURN_LIMIT_S:
        raise SystemExit(f"{report}\nFAILED: {load.lost[:3]}")
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_vllm = importlib.util.find_spec("vllm") is not None
    parser.add_argument("--backend", choices=["embedded", "vllm"], default="vllm" if has_vllm else "embedded")
    parser.add_argument("--model", choices=SHAPES, default="0.6b" if num_gpus() else "3.3m")
    parser.add_argument("--concurrency", type=int, default=256 if num_gpus() else 32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--phase", type=float, default=15.0, help="seconds of each phase")
    parser.add_argument("--publish-every", type=float, default=4.0, help="seconds between two updates of the weights")
    parser.add_argument("--logs", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        logs = args.logs or directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        make_model(args.model, directory / "model", "bfloat16" if num_gpus() else "float32")
        servers: list[Server] = []
        try:
            for index in range(2):
                servers.append(Server(index, directory / "model", args, logs))
            report = asyncio.run(measure(args, directory / "model", directory / "run", servers))
        finally:
            for server in servers:
                server.kill()
    print(
        f"{args.model}, {args.backend}, two servers, {args.concurrency} rollouts of {args.new_tokens} tokens at a time"
    )
    print(f"\n{report}")


if __name__ == "__main__":
    main()
