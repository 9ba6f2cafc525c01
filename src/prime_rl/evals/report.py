"""What an evaluation found: figures of one environment at one step, and how they are shown and written. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import comb, nan
from statistics import fmean
from typing import Any

import msgspec
from rich.table import Table

from prime_rl.environments.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Figures of one environment, evaluated with the weights of one step.

    Example: 20 examples with 4 rollouts each, 2 of which failed -> num_rollouts 80, errors {"timeout": 2}
    """

    env: str
    step: int
    num_examples: int
    rollouts_per_example: int
    num_rollouts: int
    avg: float
    """avg@k: mean reward of the rollouts that did not fail, k being `rollouts_per_example`; NaN when all failed."""
    pass_at: dict[int, float]
    """pass@k by k; empty unless every reward is 0 or 1."""
    errors: dict[str, int]
    """Failed rollouts by kind. They are in none of the figures."""
    completion_len: float
    """Mean tokens of a completion."""
    truncated: float
    """Share of completions that a length limit ended."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The figures as metrics."""
        prefix = f"eval/{self.env}"
        return {
            f"{prefix}/avg@{self.rollouts_per_example}": self.avg,
            **{f"{prefix}/pass@{k}": value for k, value in self.pass_at.items()},
            f"{prefix}/completion_len/mean": self.completion_len,
            f"{prefix}/is_truncated/mean": self.truncated,
            f"{prefix}/errors": float(sum(self.errors.values())),
            f"time/eval/{self.env}": self.seconds,
        }


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Chance that one of k rollouts is right at least, drawn without replacement from `num` with `num_right` right.

    The unbiased estimate of arXiv 2107.03374: 1 - C(n - c, k) / C(n, k).

    Example: pass_at_k(4, 1, 2) == 0.5
    """
    assert 0 <= num_right <= num
    assert 1 <= k <= num
    return 1 - comb(num - num_right, k) / comb(num, k)


def make_report(
    rollouts: Sequence[Rollout], *, env: str, step: int, rollouts_per_example: int, seconds: float
) -> EvalReport:
    """Figures over the rollouts of one environment."""
    scored = [rollout for rollout in rollouts if rollout.failure is None]
    rewards: dict[int, list[float]] = {}
    for rollout in scored:
        rewards.setdefault(rollout.example, []).append(rollout.reward)
    return EvalReport(
        env=env,
        step=step,
        num_examples=len({rollout.example for rollout in rollouts}),
        rollouts_per_example=rollouts_per_example,
        num_rollouts=len(rollouts),
        avg=fmean(rollout.reward for rollout in scored) if scored else nan,
        pass_at=_pass_at(list(rewards.values()), rollouts_per_example),
        errors=dict(Counter(str(rollout.failure.kind) for rollout in rollouts if rollout.failure is not None)),
        completion_len=fmean(rollout.num_completion_tokens for rollout in scored) if scored else nan,
        truncated=fmean(rollout.truncated for rollout in scored) if scored else nan,
        seconds=seconds,
    )


def _pass_at(rewards: Sequence[Sequence[float]], rollouts_per_example: int) -> dict[int, float]:
    """pass@k for the powers of two up to `rollouts_per_example`, over examples with k rollouts that did not fail."""
    if not all(reward in (0, 1) for group in rewards for reward in group):
        return {}
    pass_at: dict[int, float] = {}
    for k in (1 << power for power in range(rollouts_per_example.bit_length())):
        groups = [group for group in rewards if len(group) >= k]
        if groups:
            pass_at[k] = fmean(pass_at_k(len(group), round(sum(group)), k) for group in groups)
    return pass_at


def log_line(report: EvalReport) -> str:
    """Example: Evaluated reverse-text | Step 20 | avg@4: 0.9120 | Errors: 0 | Time: 3.1s"""
    return (
        f"Evaluated {report.env} | Step {report.step} | avg@{report.rollouts_per_example}: {report.avg:.4f} | "
        f"Errors: {sum(report.errors.values())} | Time: {report.seconds:.1f}s"
    )


def report_json(report: EvalReport) -> bytes:
    """The contents of `report.json`."""
    return msgspec.json.format(msgspec.json.encode(asdict(report))) + b"\n"


def results_jsonl(rollouts: Iterable[Rollout]) -> bytes:
    """The contents of `results.jsonl`: one rollout a line, failed ones with their failure."""
    return b"".join(msgspec.json.encode(_row(rollout)) + b"\n" for rollout in rollouts)


def _row(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "example": rollout.example,
        "reward": rollout.reward if failure is None else None,
        "failure": None if failure is None else str(failure),
        "metrics": rollout.metrics,
        "messages": rollout.messages,
        "num_completion_tokens": rollout.num_completion_tokens,
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "timings": rollout.timings,
    }


def report_table(reports: Sequence[EvalReport], base_step: int | None = None) -> Table:
    """All figures, one row per environment and step. The row of `base_step` is called the base."""
    ks = sorted({k for report in reports for k in report.pass_at if k > 1})
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("environment", min_width=max((len(report.env) for report in reports), default=0))
    table.add_column("weights", no_wrap=True)
    for name in ("examples", "avg@k", *(f"pass@{k}" for k in ks), "tokens", "truncated", "errors", "time"):
        table.add_column(name, justify="right")
    for report in sorted(reports, key=lambda report: report.env):
        errors = ", ".join(f"{number} {kind}" for kind, number in sorted(report.errors.items())) or "0"
        table.add_row(
            report.env,
            "base" if report.step == base_step else f"step_{report.step}",
            f"{report.num_examples} x {report.rollouts_per_example}",
            f"{report.avg:.4f}",
            *(f"{report.pass_at[k]:.4f}" if k in report.pass_at else "-" for k in ks),
            f"{report.completion_len:.1f}",
            f"{report.truncated:.1%}",
            errors,
            f"{report.seconds:.1f} s",
        )
    return table
