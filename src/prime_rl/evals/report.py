"""What an evaluation found: figures of one environment at one step, and how they are shown and written."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, nan
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from prime_rl.environments.rollouts import Failure, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the figures need of a rollout that ended: some hundred bytes, where its tokens are megabytes."""

    example: int
    reward: float
    """NaN where it failed."""
    failure: Failure | None
    num_completion_tokens: int
    truncated: bool
    versions: tuple[int, int] | None
    """Oldest and newest weights that sampled a token of it; None where none was."""

    @classmethod
    def of(cls, rollout: Rollout) -> Outcome:
        versions = [version for turn in rollout.turns for version in turn.versions]
        return cls(
            example=rollout.example,
            reward=rollout.reward,
            failure=rollout.failure,
            num_completion_tokens=rollout.num_completion_tokens,
            truncated=rollout.truncated,
            versions=(min(versions), max(versions)) if versions else None,
        )


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
    first_errors: dict[str, str]
    """By kind: what the first that failed so said."""
    retries: int
    """Times that a rollout was run again, for its server or worker was lost."""
    completion_len: float
    """Mean tokens of a completion."""
    truncated: float
    """Share of completions that a length limit ended."""
    versions: tuple[int, int] | None
    """Oldest and newest weights that sampled a token of it; None when all failed."""
    seconds: float

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    def metrics(self, kind: str = "eval") -> dict[str, float]:
        """The figures as metrics, whose names begin with `kind`."""
        prefix = f"{kind}/{self.env}"
        versions = zip(("min", "max"), self.versions or (), strict=False)
        return {
            f"{prefix}/avg@{self.rollouts_per_example}": self.avg,
            **{f"{prefix}/pass@{k}": value for k, value in self.pass_at.items()},
            f"{prefix}/completion_len/mean": self.completion_len,
            f"{prefix}/is_truncated/mean": self.truncated,
            f"{prefix}/errors": float(self.num_failed),
            **{f"{prefix}/errors/{kind}": float(number) for kind, number in self.errors.items()},
            f"{prefix}/retries": float(self.retries),
            **{f"{prefix}/version/{name}": float(version) for name, version in versions},
            f"time/{prefix}": self.seconds,
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
    outcomes: Sequence[Outcome], *, env: str, step: int, rollouts_per_example: int, seconds: float, retries: int = 0
) -> EvalReport:
    """Figures over the rollouts of one environment."""
    scored = [outcome for outcome in outcomes if outcome.failure is None]
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    rewards: dict[int, list[float]] = {}
    for outcome in scored:
        rewards.setdefault(outcome.example, []).append(outcome.reward)
    versions = [outcome.versions for outcome in scored if outcome.versions is not None]
    return EvalReport(
        env=env,
        step=step,
        num_examples=len({outcome.example for outcome in outcomes}),
        rollouts_per_example=rollouts_per_example,
        num_rollouts=len(outcomes),
        avg=fmean(outcome.reward for outcome in scored) if scored else nan,
        pass_at=_pass_at(list(rewards.values()), rollouts_per_example),
        errors=dict(Counter(failure.kind.value for failure in failures)),
        first_errors={failure.kind.value: str(failure) for failure in reversed(failures)},
        retries=retries,
        completion_len=fmean(outcome.num_completion_tokens for outcome in scored) if scored else nan,
        truncated=fmean(outcome.truncated for outcome in scored) if scored else nan,
        versions=(min(old for old, _ in versions), max(new for _, new in versions)) if versions else None,
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
        f"Errors: {report.num_failed} | Time: {report.seconds:.1f}s"
    )


def failures_text(report: EvalReport) -> str:
    """Example: 3 of 80 rollouts of reverse-text failed: 2 timeout (timeout: took longer than 60 s), 1 scorer (...)"""
    kinds = ", ".join(f"{number} {kind} ({report.first_errors[kind]})" for kind, number in report.errors.items())
    return f"{report.num_failed} of {report.num_rollouts} rollouts of {report.env} failed: {kinds}"


def report_json(report: EvalReport) -> bytes:
    """The contents of `report.json`."""
    return msgspec.json.format(msgspec.json.encode(asdict(report))) + b"\n"


def result_line(rollout: Rollout) -> bytes:
    """A rollout in `results.jsonl`; one that failed with its failure and without a reward."""
    return msgspec.json.encode(_row(rollout)) + b"\n"


def _row(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "example": rollout.example,
        "rollout": rollout.id,
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
    """All figures, one row per environment and step. The row of `base_step` is called the base.

    Weights "step_20-22": it began with those of step 20, and newer ones came while it ran.
    """
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
            _weights(report, base_step),
            f"{report.num_examples} x {report.rollouts_per_example}",
            f"{report.avg:.4f}",
            *(f"{report.pass_at[k]:.4f}" if k in report.pass_at else "-" for k in ks),
            f"{report.completion_len:.1f}",
            f"{report.truncated:.1%}",
            errors,
            f"{report.seconds:.1f} s",
        )
    return table


def table_text(reports: Sequence[EvalReport], base_step: int | None = None, width: int = 200) -> str:
    """The same as text of at most `width` columns, for a log."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(report_table(reports, base_step))
    return text.getvalue()


def _weights(report: EvalReport, base_step: int | None) -> str:
    name = "base" if report.step == base_step else f"step_{report.step}"
    newest = report.step if report.versions is None else report.versions[1]
    return f"{name}-{newest}" if newest > report.step else name
