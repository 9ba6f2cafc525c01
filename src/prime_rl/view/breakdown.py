"""Where the time of a run went, and who waited for whom, from the metrics of trainer and orchestrator. Pure."""

from collections.abc import Sequence
from typing import Final

from prime_rl.monitors.tables import Column, Row, aligned, metric

TRAINER: Final = (
    metric("trainer s", "time/step", ".2f"),
    metric("for batch", "time/wait_for_batch", ".2f"),
    metric("fwd+bwd", "time/forward_backward", ".2f"),
    metric("publish", "time/publish", ".2f"),
    metric("mismatch KL", "mismatch_kl/mean", ".1e"),
)
ORCHESTRATOR: Final = (
    metric("orchestr. s", "time/step", ".2f"),
    metric("for rollouts", "time/generate", ".2f"),
    metric("for weights", "time/wait_for_weights", ".2f"),
    metric("update", "time/update_weights", ".2f"),
    metric("reward", "reward/mean", ".3f"),
)
"""`update` is part of none of the others: the server loads weights while rollouts go on."""

NUM_START: Final = 1
"""Steps at the beginning that are shown and not counted: processes load and warm up in them."""


def breakdown(trained: Sequence[Row], batches: Sequence[Row]) -> str:
    """A line a step, sums of seconds, and a verdict.

    The trainer waits for batches, the orchestrator for rollouts (generation is at work) and for weights (generation
    stands still because it is as far ahead as it may be).
    """
    columns = [*((column, trained) for column in TRAINER), *((column, batches) for column in ORCHESTRATOR)]
    lines = [["step", *(column.header for column, _ in columns)]]
    for step in range(min(len(trained), len(batches))):
        lines.append([str(step), *(_cell(column, rows[step]) for column, rows in columns)])
    sums = [_sum(column, rows) if column.form == ".2f" else "" for column, rows in columns]
    lines.append([f"sum from {NUM_START}", *sums])
    return f"{aligned(lines)}\n\n{_verdict(trained[NUM_START:], batches[NUM_START:])}"


def _verdict(trained: Sequence[Row], batches: Sequence[Row]) -> str:
    trainer_s, orchestrator_s = _total(trained, "time/step"), _total(batches, "time/step")
    if not trainer_s or not orchestrator_s:
        return "too few steps to say who waited for whom"
    for_batches = _total(trained, "time/wait_for_batch") / trainer_s
    for_weights = _total(batches, "time/wait_for_weights") / orchestrator_s
    slower = "generation" if for_batches > for_weights else "training"
    return (
        f"the trainer waited for batches {for_batches:.0%} of its time, "
        f"the orchestrator for weights {for_weights:.0%}: {slower} sets the pace"
    )


def _cell(column: Column, row: Row) -> str:
    value = column.value(row)
    return "-" if value is None else f"{value:{column.form}}"


def _sum(column: Column, rows: Sequence[Row]) -> str:
    return f"{sum(column.value(row) or 0.0 for row in rows[NUM_START:]):{column.form}}"


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)
