"""The orchestrator under load: thousands of rollouts of many turns in flight, against a server with realistic latency.

    python benchmarks/orchestrator.py --profile                                    # the whole: 4,096 in flight
    python benchmarks/orchestrator.py --rollouts 256 --latency 2 --minutes 0.5     # a small machine, a short look
    python benchmarks/orchestrator.py --bare --latency 1 --minutes 2 --profile     # the orchestrator alone

Real: the orchestrator with all its loops, workers with a verifiers environment, batches in files. Stand-ins, a process
each (`stand_ins`): the inference server, whose turns take a time drawn from a log-normal distribution, and the trainer,
which takes a batch as soon as it is there. They have the same cores and the same priority as all else.

All rollouts begin at once, the first of them with fewer turns (`many_turns_env`), so that later ones end, and are
started, at all times alike. What is reported begins when all are in flight and each has asked the server once, and
lasts `--minutes`. Every process is measured alone, by its CPU time.
"""

import argparse
import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
from inference import machine
from load_report import Record, table_of_lag, table_of_processes, tables_of_profile, words_on_throughput
from watching import Beats, Collections, Sampler, children, usage

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.environments.pool import EnvPool, environment_spec, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec
from prime_rl.monitors.events import EventLog
from prime_rl.orchestrator.groups import Counters
from prime_rl.orchestrator.orchestrator import Extensions, Orchestrator, build_policy
from prime_rl.orchestrator.scoring import build_scorer
from prime_rl.orchestrator.traces import open_traces
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchWriter

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/reverse_text_cpu/model"
"""Its tokenizer has a token for each letter, so that what is rendered again is what was sampled."""
SEQ_LEN = 2048
WINDOW = 2.0
"""Rollouts that may be active, finished ones that wait for their group or their batch included, per one in flight."""
LOOK_S = 1.0
PATIENCE_S = 24 * 3600.0


def config_of(args: argparse.Namespace, port: int, output_dir: Path) -> OrchestratorConfig:
    """A window that always has room for `--rollouts` in flight, and weights of any age: no trainer is measured."""
    level = max(1, round(WINDOW * args.rollouts / args.batch_size) - 1)
    return OrchestratorConfig.model_validate(
        {
            "client": {"base_url": [f"http://127.0.0.1:{port}/v1"], "timeout": PATIENCE_S},
            "model": {"name": str(MODEL)},
            "env": [
                {
                    "id": "many-turns-env",
                    "args": {
                        "num_turns": args.turns,
                        "num_examples": max(1, args.rollouts // args.group),
                        "num_short": args.rollouts // args.workers,
                        "profile_dir": str(output_dir) if args.profile else None,
                    },
                }
            ],
            "sampling": {"max_tokens": args.tokens},
            "output_dir": output_dir,
            "seq_len": SEQ_LEN,
            "batch_size": args.batch_size,
            "rollouts_per_example": args.group,
            "max_async_level": level,
            "max_off_policy_steps": 1000,
            "max_concurrent": args.rollouts,
            "rollout_timeout": PATIENCE_S,
            "workers_per_env": args.workers,
            "seed": args.seed,
            "log": {"level": "warning"},
        }
    )


def spec_of(args: argparse.Namespace, config: OrchestratorConfig) -> EnvironmentSpec:
    """The environment; with `--bare` rollouts are made up in its workers."""
    (env,) = config.env
    spec = environment_spec(
        env, client=config.client, model=config.model.name, log=config.log, retry_s=config.outage_timeout
    )  # fmt: skip
    if args.bare:
        made_up = {"num_tokens": args.tokens, "latency_s": args.latency, "spread": args.spread, "seed": args.seed}
        spec = msgspec.structs.replace(spec, door="bare_door", args=spec.args | made_up)
    return spec


@contextmanager
def stand_ins(args: argparse.Namespace, port: int, output_dir: Path) -> Iterator[dict[int, str]]:
    """The server and the trainer: roles by process id."""
    script = str(ROOT / "benchmarks/stand_ins.py")
    server = [sys.executable, script, "server", "--port", str(port), "--model", str(MODEL)]
    server += ["--latency", str(args.latency), "--spread", str(args.spread)]
    server += ["--tokens", str(args.tokens), "--seed", str(args.seed)]
    trainer = [sys.executable, script, "trainer", str(output_dir)]
    processes = {subprocess.Popen(words): role for words, role in ((server, "server"), (trainer, "trainer"))}
    try:
        yield {process.pid: role for process, role in processes.items()}
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def measure(args: argparse.Namespace, port: int, output_dir: Path, others: Mapping[int, str]) -> str:
    """Run until all rollouts are in flight, and then for `--minutes`; the report.

    Raises: SystemExit when rollouts failed or were lost count of.
    """
    config, paths = config_of(args, port, output_dir), RunPaths(output_dir)
    record, beats, spec = Record(), Beats(), spec_of(args, config)
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog.opened(paths.events))
        clients = await stack.enter_async_context(open_clients(config.client))
        policy = build_policy(config, clients, paths, events)
        await policy.start(60.0)
        opening = open_pools([spec], num_workers=args.workers, log_dir=paths.logs / "envs")
        pools = await stack.enter_async_context(opening)
        traces = await stack.enter_async_context(open_traces(config, paths.traces))
        orchestrator = Orchestrator(
            config=config,
            pools=pools,
            policy=policy,
            writer=BatchWriter(paths.rollouts),
            monitor=record,
            scorer=build_scorer(config),
            extensions=Extensions(on_end=record.noting(traces.note)),
        )
        collections, sampler = stack.enter_context(Collections()), Sampler(beats)
        if args.profile:
            stack.enter_context(sampler)
        pool = pools[spec.label]
        running = [asyncio.create_task(orchestrator.run()), asyncio.create_task(beats.run())]
        try:
            await within(running, all_asked(pool, port, args), None)
            at_start = beats.lags
            for watch in (beats, collections, sampler):
                watch.restart()
            record.start(await statistics(port))
            await within(running, look(record, pool, others), 60 * args.minutes)
            record.stop(await statistics(port))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    parts = [
        table_of_processes(record),
        table_of_lag(at_start, beats, collections),
        words_on_throughput(
            record, rollouts=args.rollouts, turns=args.turns, batch_size=args.batch_size, bare=args.bare
        ),
    ]
    if args.profile:
        parts.append(tables_of_profile(sampler, output_dir))
    report = "\n\n".join(parts)
    check(orchestrator._scheduler.counters, record, report)
    return report


async def within(
    running: Sequence[asyncio.Task[None]], work: Coroutine[None, None, None], limit_s: float | None
) -> None:
    """Until `work` is done, or for `limit_s`. Raises: what one of those that run ended with."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait([*running, task], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for ended in done:
        ended.result()


async def all_asked(pool: EnvPool, port: int, args: argparse.Namespace) -> None:
    """Until all rollouts are in flight, and each has asked the server once."""
    while True:
        are_in_flight = pool.load.in_flight >= args.rollouts
        if are_in_flight and (args.bare or (await statistics(port))["num_asked"] >= args.rollouts):
            return
        await asyncio.sleep(LOOK_S)


async def look(record: Record, pool: EnvPool, stand_ins: Mapping[int, str]) -> None:
    """Note what the processes use, now and then. Returns never."""
    while True:
        workers = sorted(pid for pid in children(os.getpid()) if pid not in stand_ins)
        named = {pid: f"worker {number}" for number, pid in enumerate(workers)}
        for pid, name in {os.getpid(): "orchestrator", **named, **stand_ins}.items():
            if (used := usage(pid)) is not None:
                record.usage.setdefault(name, []).append(used)
        record.in_flight.append(pool.load.in_flight)
        await asyncio.sleep(LOOK_S)


async def statistics(port: int) -> dict[str, float]:
    """The server's own."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60.0) as client:
        answer: dict[str, float] = (await client.get(f"http://127.0.0.1:{port}/statistics")).json()
        return answer


def check(counters: Counters, record: Record, report: str) -> None:
    """Raises: SystemExit unless every rollout that was dispatched ended once, and none failed."""
    ends = record.ends
    if counters.dispatched != ends.total() or ends["failed"] or not ends["used"]:
        raise SystemExit(f"{report}\n\nFAILED: {counters.dispatched} dispatched, ended: {dict(ends)}; {counters}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4096, help="rollouts in flight")
    parser.add_argument("--turns", type=int, default=16, help="turns of each")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--latency", type=float, default=17.0, help="median seconds of an answer")
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of the latency's logarithm")
    parser.add_argument("--group", type=int, default=8, help="rollouts of one example")
    parser.add_argument("--batch-size", type=int, help="rollouts of a batch; default: an eighth of those in flight")
    parser.add_argument("--workers", type=int, default=2, help="most worker processes")
    parser.add_argument(
        "--bare", action="store_true", help="workers that make rollouts up: without verifiers and server"
    )
    parser.add_argument("--minutes", type=float, default=18.0, help="after all rollouts are in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="what the CPU time goes to, which costs a little")
    args = parser.parse_args(argv)
    if args.batch_size is None:
        args.batch_size = max(args.group, args.rollouts // 8 // args.group * args.group)
    return args


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    args = parse()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rollout, inherited
    paths = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks/environments"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"python {' '.join(sys.argv)}\n{machine()}\n", flush=True)
    port = free_port()
    with tempfile.TemporaryDirectory() as name, stand_ins(args, port, Path(name)) as others:
        print(asyncio.run(measure(args, port, Path(name), others)))


if __name__ == "__main__":
    main()
