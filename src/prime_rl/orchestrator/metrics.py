"""The metrics of one shipped batch, its log line, and its rollouts for people to read. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import msgspec

from prime_rl.environments.rollouts import FailureKind
from prime_rl.environments.trajectories import Strategy
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.groups import ENDS, Counters, End, Ended
from prime_rl.orchestrator.scoring import ScoredRollout

PERCENTILES: Final = (50, 90, 99)
TOO_LONG: Final = End(kind="filtered", why="too_long")
MANY_TOO_LONG: Final = 0.1
"""When more of the rollouts are left out as too long, that is told."""


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


class EndTally:
    """How the rollouts of each environment ended, since the last row of metrics."""

    def __init__(self) -> None:
        self._ends: Counter[tuple[str, End]] = Counter()

    def note(self, ended: Ended[Any, Any]) -> None:
        """Count one."""
        self._ends[ended.dispatch.example.env, ended.end] += 1

    def take(self) -> dict[str, float]:
        """`rollouts/<environment>/<kind>` for every kind of end, and `/<kind>/<why>` for those that there were;
        `/error_rate` of those that were not cancelled. Over all environments, of those that ended well, the shares
        that were left out of training, `rollouts/left_out_rate`, and left out as too long, `rollouts/too_long_rate`."""
        ends, self._ends = self._ends, Counter()
        if not ends:
            return {}
        whole = Counter[str]()
        for (_, end), number in ends.items():
            whole[end.kind] += number
            whole["too_long"] += number if end == TOO_LONG else 0
        well = max(1, whole["used"] + whole["filtered"])
        metrics: dict[str, float] = {
            "rollouts/left_out_rate": whole["filtered"] / well,
            "rollouts/too_long_rate": whole["too_long"] / well,
        }
        for env in dict.fromkeys(env for env, _ in ends):
            kinds = dict.fromkeys(ENDS, 0)
            for (where, end), number in ends.items():
                if where == env:
                    kinds[end.kind] += number
                    if end.why:
                        metrics[f"rollouts/{env}/{end.kind}/{end.why}"] = number
            metrics |= {f"rollouts/{env}/{kind}": number for kind, number in kinds.items()}
            judged = sum(kinds.values()) - kinds["cancelled"]
            metrics[f"rollouts/{env}/error_rate"] = kinds["failed"] / judged if judged else 0.0
        return metrics


def batch_metrics(
    groups: Sequence[Sequence[ScoredRollout]],
    *,
    step: int,
    async_level: int,
    clock: Clock,
    failures: Mapping[FailureKind, int],
    counters: Counters,
    strategy: Strategy = "interleaved",
) -> dict[str, float]:
    """Metrics of batch `step`. Means over rollouts, except `off_policy_gap/mean`, which is over sampled tokens.

    What is told of all rollouts under `<name>/<statistic>` is told of those of one environment under
    `<name>/<environment>/<statistic>`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [[scored.rollout.reward for scored in group] for group in groups]
    zero_variance = fmean(max(group) == min(group) for group in rewards)
    metrics: dict[str, float] = {
        "async_level": async_level,
        "batch/zero_variance": zero_variance,
        "batch/effective_batch_size": 1 - zero_variance,
        "filter/total_detected_rate": fmean(bool(scored.detected) for scored in rollouts),
        "batch/solve_none": fmean(max(group) <= 0 for group in rewards),
        "batch/solve_all": fmean(min(group) >= 1 for group in rewards),
        "perf/throughput": sum(scored.rollout.num_completion_tokens for scored in rollouts) / clock.step_s,
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
    metrics |= {f"stop_reason/{name}": share for name, share in _shares(_stop_reasons(rollouts)).items()}
    metrics |= _rollout_metrics(rollouts, step=step, strategy=strategy)
    by_env: dict[str, list[ScoredRollout]] = {}
    for scored in rollouts:
        by_env.setdefault(scored.rollout.env, []).append(scored)
    for env, of_env in by_env.items():
        metrics[f"batch/{env}"] = len(of_env) / len(rollouts)
        metrics |= _rollout_metrics(of_env, step=step, strategy=strategy, env=env)
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
        + (f" | Splits: {splits:.0f}" if (splits := metrics.get("trajectory/splits", 0.0)) else "")
        + (f" | Left Out: {rate:.0%}" if (rate := metrics.get("rollouts/left_out_rate", 0.0)) else "")
    )


def too_long_warning(metrics: Mapping[str, float], seq_len: int) -> str:
    """What to say when many rollouts are too long to be trained on; "" when they are not many."""
    rate = metrics.get("rollouts/too_long_rate", 0.0)
    if rate <= MANY_TOO_LONG:
        return ""
    return (
        f"{rate:.0%} of the rollouts since the last batch are longer than seq_len = {seq_len} and were left out of "
        "training; raise seq_len, or lower sampling.max_tokens or the server's max_model_len"
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


def _rollout_metrics(
    rollouts: Sequence[ScoredRollout], *, step: int, strategy: Strategy, env: str = ""
) -> dict[str, float]:
    """What is told of all rollouts, and of those of each environment."""
    of_env = f"/{env}" if env else ""
    gaps = [step - version for scored in rollouts for version in scored.versions]
    metrics = {
        **_spread(f"reward{of_env}", [scored.rollout.reward for scored in rollouts]),
        **_spread(f"advantage{of_env}", [scored.advantage for scored in rollouts]),
        **_spread(f"seq_len{of_env}", [scored.num_tokens for scored in rollouts]),
        **_spread(f"prompt_len{of_env}", [len(scored.rollout.turns[0].prompt_ids) for scored in rollouts]),
        **_spread(f"completion_len{of_env}", [scored.rollout.num_completion_tokens for scored in rollouts]),
        **_spread(f"num_turns{of_env}", [len(scored.rollout.turns) for scored in rollouts]),
        f"is_truncated{of_env}/mean": fmean(scored.rollout.truncated for scored in rollouts),
        f"off_policy_gap{of_env}/mean": fmean(gaps),
        f"off_policy_gap{of_env}/max": max(gaps),
    }
    if strategy == "interleaved":
        metrics[f"trajectory{of_env}/splits"] = sum(len(scored.samples) - 1 for scored in rollouts)
    reported: dict[str, list[float]] = {}
    for scored in rollouts:
        for name, value in scored.rollout.metrics.items():
            reported.setdefault(f"metrics{of_env}/{name}/mean", []).append(value)
        for name, value in scored.rollout.timings.items():
            reported.setdefault(f"time/rollout{of_env}/{name}/mean", []).append(value)
    return metrics | {name: fmean(values) for name, values in reported.items()}


def _stop_reasons(rollouts: Iterable[ScoredRollout]) -> Counter[str]:
    return Counter(scored.rollout.stop_reason for scored in rollouts if scored.rollout.stop_reason)


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: count / counts.total() for name, count in counts.items()}
