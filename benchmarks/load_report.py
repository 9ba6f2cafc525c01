"""What `orchestrator.py` saw under load, in tables."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from watching import STALL_S, Beats, Collections, Durations, Sampler, Usage, threads, trend

from prime_rl.monitors.tables import aligned
from prime_rl.orchestrator.generation import EndedRollout

LAG_GOAL_S = 0.1
SLOPE_S = 600.0
"""Memory's slope is that of so many last seconds."""
NUM_SHOWN = 16
GROUPS = {
    "HTTP client": {"openai", "httpx", "httpx2", "httpcore", "anyio", "sniffio", "h11", "httpxyz", "distro"},
    "messages to tokens and back": {"transformers", "tokenizers", "renderers", "jinja2", "huggingface_hub"},
    "verifiers": {"verifiers", "pydantic", "pydantic_core", "datasets"},
}
"""What a worker does, by the packages that do it."""


@dataclass(kw_only=True)
class Record:
    """What happened, by time. Times are those of `time.monotonic`. A `Monitor`."""

    ends: Counter[str] = field(default_factory=Counter)
    """Rollouts that ended, by kind."""
    batches: list[tuple[float, float]] = field(default_factory=list)
    """Time and the total of tokens."""
    usage: dict[str, list[Usage]] = field(default_factory=dict)
    """By process."""
    in_flight: list[int] = field(default_factory=list)
    """Rollouts in workers, at each look."""
    statistics: list[dict[str, float]] = field(default_factory=list)
    """Of the server, at the beginning and the end."""
    ends_before: Counter[str] = field(default_factory=Counter)
    """Ends until the beginning."""
    threads: Counter[str] = field(default_factory=Counter)
    """CPU seconds by name of the orchestrator's threads; before `stop`, those until the beginning."""
    started: float = 0.0
    stopped: float = 0.0

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.batches.append((time.monotonic(), metrics["progress/total_tokens"]))

    def close(self) -> None:
        pass

    def noting(self, on_end: Callable[[EndedRollout], None]) -> Callable[[EndedRollout], None]:
        """`on_end`, and a note of how."""

        def note(ended: EndedRollout) -> None:
            self.ends[ended.end.kind] += 1
            on_end(ended)

        return note

    def start(self, statistics: dict[str, float]) -> None:
        """From here on it counts."""
        self.statistics, self.ends_before, self.threads = [statistics], self.ends.copy(), threads()
        self.started = time.monotonic()

    def stop(self, statistics: dict[str, float]) -> None:
        """Until here."""
        self.stopped = time.monotonic()
        self.statistics.append(statistics)
        self.threads = threads() - self.threads

    @property
    def seconds(self) -> float:
        return self.stopped - self.started

    @property
    def num_turns(self) -> float:
        """Answers of the server."""
        return self.statistics[-1]["num_answered"] - self.statistics[0]["num_answered"]

    def cpu_s(self, role: str) -> float:
        """Of the processes of a role."""
        return sum(looks[-1].cpu_s - looks[0].cpu_s for name, looks in self.usage.items() if name.startswith(role))


def table_of_processes(record: Record) -> str:
    """CPU and memory of each."""
    rows = [["process", "CPU s", "cores", "in kernel", "in threads", "RSS MiB", "then", "MiB/min", "+-"]]
    for name, looks in sorted(record.usage.items()):
        cpu_s = looks[-1].cpu_s - looks[0].cpu_s
        last = [(look.at, look.rss_mib) for look in looks if look.at >= looks[-1].at - SLOPE_S]
        slope, error = trend(last)
        rows.append(
            [
                name,
                f"{cpu_s:.1f}",
                f"{cpu_s / record.seconds:.2f}",
                f"{(looks[-1].kernel_s - looks[0].kernel_s) / max(cpu_s, 1e-9):.0%}",
                f"{max(0.0, 1 - (looks[-1].main_s - looks[0].main_s) / max(cpu_s, 1e-9)):.0%}",
                f"{looks[0].rss_mib:.0f}",
                f"{looks[-1].rss_mib:.0f}",
                f"{60 * slope:+.2f}",
                f"{60 * error:.2f}",
            ]
        )
    span = min(SLOPE_S, record.seconds)
    of_threads = [f"{name} {cpu_s:.1f} s" for name, cpu_s in record.threads.most_common()]
    return (
        f"{aligned(rows)}\n"
        f"of the CPU's time, that in the kernel and that in other threads than the main one; RSS at the beginning and "
        f"the end; its slope over the last {span / 60:.1f} min, with the standard error\n"
        f"the orchestrator's threads: {', '.join(of_threads)}"
    )


def table_of_lag(at_start: Durations, beats: Beats, collections: Collections) -> str:
    """How late the event loop was; milliseconds."""
    rows = [["ms", "p50", "p90", "p99", "p99.9", "most"]]
    for name, values in (
        ("event loop late", beats.lags),
        ("the same, while rollouts were started", at_start),
        ("CPU of its thread between two looks", beats.busy),
        ("garbage collections, all", collections.all),
        ("garbage collections, full", collections.full),
    ):
        rows.append([name, *(f"{1000 * values.percentile(at):.1f}" for at in (50, 90, 99, 99.9, 100))])
    verdict = "reached" if beats.lags.percentile(99) < LAG_GOAL_S else "MISSED"
    return (
        f"{aligned(rows)}\n"
        f"goal: event loop late p99 under {1000 * LAG_GOAL_S:.0f} ms: {verdict}; {len(beats.lags)} looks; garbage "
        f"collection took {collections.all.total_s:.2f} s of CPU, {collections.full.total_s:.2f} s of it in "
        f"{len(collections.full)} full ones"
    )


def words_on_throughput(record: Record, *, rollouts: int, turns: int, batch_size: int, bare: bool) -> str:
    """Rates, and what bounds them. `rollouts` in flight, of `turns` each."""
    first, last = record.statistics[0], record.statistics[-1]
    kinds = record.ends - record.ends_before
    num_turns = turns * float(kinds["used"]) if bare else record.num_turns
    rates = "fewer than two batches"
    batches = [batch for batch in record.batches if record.started < batch[0] <= record.stopped]
    if len(batches) > 1:
        (since, tokens_before), (until, tokens) = batches[0], batches[-1]
        rates = (
            f"{(len(batches) - 1) * batch_size / (until - since):.2f} rollouts/s shipped, "
            f"{(tokens - tokens_before) / (until - since):.0f} tokens packed/s ({len(batches)} batches)"
        )
    where = "without a server"
    if not bare:
        at_server = (last["running_s"] - first["running_s"]) / (last["at"] - first["at"])
        what = "the server's latency" if at_server > 0.8 * rollouts else "the processes' CPU"
        where = f"{at_server:.0f} of them at the server in the mean: the bound is {what}"
    costs = [
        f"{role} {1000 * record.cpu_s(role) / max(1.0, num_turns):.2f}"
        for role in ("orchestrator", "worker", "server", "trainer")
    ]
    return (
        f"{record.seconds / 60:.1f} min with {min(record.in_flight)} to {max(record.in_flight)} rollouts in flight "
        f"(mean {fmean(record.in_flight):.0f}), {where}\n"
        f"{rates}; {num_turns / record.seconds:.1f} turns/s: {num_turns / turns / rollouts:.2f} generations of "
        f"{rollouts} rollouts of {turns} turns\n"
        f"CPU ms per turn: {', '.join(costs)}\n"
        f"rollouts that ended: {', '.join(f'{number} {kind}' for kind, number in sorted(kinds.items()))}"
    )


def tables_of_profile(sampler: Sampler, profile_dir: Path) -> str:
    """Where the CPU time goes: the orchestrator's, and that of its workers."""
    parts = [
        _shares("the orchestrator's main thread, by module and package", sampler.groups),
        _shares("the orchestrator's main thread, by function", sampler.places),
        _shares(f"the same, while its loop was late by more than {1000 * STALL_S:.0f} ms", sampler.late),
    ]
    seen = [json.loads(path.read_text()) for path in sorted(profile_dir.glob("*.json"))]
    if seen:
        packages: Counter[str] = Counter()
        places: Counter[str] = Counter()
        for one in seen:
            packages.update(one["groups"])
            places.update(one["places"])
        parts += [
            _shares("the workers' main threads, by what they do", _grouped(packages)),
            _shares("the workers' main threads, by module and package", packages),
            _shares("the workers' main threads, by function", places),
        ]
    return "\n\n".join(parts)


def _grouped(packages: Mapping[str, float]) -> Counter[str]:
    groups: Counter[str] = Counter()
    for package, seconds in packages.items():
        ours = "prime_rl" if "/" in package else "the environment, asyncio, others"
        groups[next((name for name, members in GROUPS.items() if package in members), ours)] += seconds
    return groups


def _shares(title: str, counts: Counter[str]) -> str:
    total = counts.total()
    rows = [f"{100 * seconds / total:>8.2f}  {name}" for name, seconds in counts.most_common(NUM_SHOWN) if seconds]
    return "\n".join([f"% of {total:.1f} s of CPU: {title}", *rows])
