"""The metrics of one shipped batch, its log line, and its rollouts for people to read. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import msgspec

from prime_rl.data.samples import TrainingSample
from prime_rl.environments.rollouts import FailureKind, Rollout
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.scheduler import Counters

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """A rollout of a batch with its advantage and the samples made of it."""

    rollout: Rollout
    advantage: float
    samples: list[TrainingSample]

    @property
    def versions(self) -> list[int]:
        """Weights versions of its sampled tokens."""
        return [version for turn in self.rollout.turns for version in turn.versions]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the server was sent, those of every turn."""
        return sum(len(turn.prompt_ids) for turn in self.rollout.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on or given as context."""
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where the time of one step went, in seconds."""

    step_s: float
    wait_for_weights_s: float
    generate_s: float
    update_weights_s: float


@dataclass(slots=True, kw_only=True)
class Progress:
    """Totals over the run."""

    samples: int = 0
    tokens: int = 0
    problems: int = 0


def batch_metrics(
    groups: Sequence[Sequence[ScoredRollout]],
    *,
    step: int,
    async_level: int,
    clock: Clock,
    failures: Mapping[FailureKind, int],
    counters: Counters,
) -> dict[str, float]:
    """Metrics of batch `step`. Means over rollouts, except `off_policy_gap/mean`, which is over sampled tokens."""
    rollouts = [rollout for group in groups for rollout in group]
    gaps = [step - version for rollout in rollouts for version in rollout.versions]
    completion_lens = [rollout.rollout.num_completion_tokens for rollout in rollouts]
    rewards = [[scored.rollout.reward for scored in group] for group in groups]
    metrics = {
        **_spread("reward", [scored.rollout.reward for scored in rollouts]),
        **_spread("seq_len", [scored.num_tokens for scored in rollouts]),
        **_spread("completion_len", completion_lens),
        "is_truncated/mean": fmean(scored.rollout.truncated for scored in rollouts),
        "num_turns/mean": fmean(len(scored.rollout.turns) for scored in rollouts),
        "off_policy_gap/mean": fmean(gaps),
        "off_policy_gap/max": max(gaps),
        "async_level": async_level,
        "batch/zero_variance": fmean(max(group) == min(group) for group in rewards),
        "perf/throughput": sum(completion_lens) / clock.step_s,
        "perf/prompt_throughput": sum(scored.num_prompt_tokens for scored in rollouts) / clock.step_s,
        "perf/rollouts_per_second": len(rollouts) / clock.step_s,
        "time/step": clock.step_s,
        "time/wait_for_weights": clock.wait_for_weights_s,
        "time/generate": clock.generate_s,
        "time/update_weights": clock.update_weights_s,
        "scheduler/groups_stale": counters.groups_stale,
        "scheduler/groups_given_up": counters.groups_given_up,
        "scheduler/rollouts_cancelled": counters.cancelled,
        "errors/rate": sum(failures.values()) / (len(rollouts) + sum(failures.values())),
    }
    metrics |= {f"errors/{kind}": float(failures.get(kind, 0)) for kind in FailureKind}
    metrics |= _latencies([scored.rollout.timings["total"] for scored in rollouts if "total" in scored.rollout.timings])
    metrics |= _by_environment(rollouts)
    return {name: float(value) for name, value in metrics.items()}


def progress_metrics(progress: Progress, groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, float]:
    """Add a batch to the totals and return them."""
    progress.samples += sum(len(group) for group in groups)
    progress.problems += len(groups)
    progress.tokens += sum(scored.num_tokens for group in groups for scored in group)
    return {
        "progress/total_samples": float(progress.samples),
        "progress/total_problems": float(progress.problems),
        "progress/total_tokens": float(progress.tokens),
    }


def server_metrics(fleet: Fleet, num_failovers: int) -> dict[str, float]:
    """Counts are totals of the run; the seconds that each server's last load of weights took."""
    return {
        "inference/servers": float(len(fleet.servers)),
        "inference/servers_up": float(fleet.num_up),
        "inference/restarts": float(fleet.num_restarts),
        "inference/failovers": float(num_failovers),
        **{f"inference/server_{index}/update_weights": server.update_s for index, server in enumerate(fleet.servers)},
    }


def log_line(step: int, metrics: Mapping[str, float]) -> str:
    """Example: Step 3 | Time: 1.20s | Reward: 0.4100 | Throughput: 2100.0 tokens/s | ..."""
    return (
        f"Step {step} | Time: {metrics['time/step']:.2f}s | Reward: {metrics['reward/mean']:.4f} | "
        f"Throughput: {metrics['perf/throughput']:.1f} tokens/s | "
        f"Seq. Length: {metrics['seq_len/mean']:.1f} tokens/sample | "
        f"Async Level: {metrics['async_level']:.0f} | Off-Policy Gap: {metrics['off_policy_gap/max']:.0f}"
    )


def readable_rollouts(groups: Iterable[Sequence[ScoredRollout]]) -> bytes:
    """One JSON object a line for each rollout, group after group."""
    rows = (_row(number, scored) for number, group in enumerate(groups) for scored in group)
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _row(group: int, scored: ScoredRollout) -> dict[str, Any]:
    rollout = scored.rollout
    return {
        "group": group,
        "env": rollout.env,
        "example": rollout.example,
        "reward": rollout.reward,
        "advantage": scored.advantage,
        "metrics": rollout.metrics,
        "messages": rollout.messages,
        "num_tokens": scored.num_tokens,
        "num_completion_tokens": rollout.num_completion_tokens,
        "versions": [min(scored.versions), max(scored.versions)],
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "timings": rollout.timings,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/mean": fmean(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Seconds that half, 90% and 99% of the rollouts did not exceed."""
    ordered = sorted(seconds)
    ranks = {percent: math.ceil(len(ordered) * percent / 100) - 1 for percent in PERCENTILES}
    return {f"latency/p{percent}": ordered[rank] for percent, rank in ranks.items() if ordered}


def _by_environment(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Mean reward per environment, and the mean of every metric that environments report."""
    by_name: dict[str, list[float]] = {}
    for scored in rollouts:
        by_name.setdefault(f"reward/{scored.rollout.env}/mean", []).append(scored.rollout.reward)
        for name, value in scored.rollout.metrics.items():
            by_name.setdefault(f"metrics/{name}/mean", []).append(value)
        for name, value in scored.rollout.timings.items():
            by_name.setdefault(f"time/rollout/{name}/mean", []).append(value)
    return {name: fmean(values) for name, values in by_name.items()}
