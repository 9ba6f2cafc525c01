"""Tables of metrics, as `--bench` prints them: a line a step, then statistics of the steps that count.

Everything shown is read from metrics files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

Row = Mapping[str, float | None]

NUM_WARM_UP: Final = 1
"""Steps at the beginning that are shown and not counted, unless a benchmark says otherwise."""

STATISTICS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "mean": fmean,
    "std": pstdev,
    "min": min,
    "max": max,
}


@dataclass(frozen=True, slots=True)
class Column:
    """One metric of a table.

    Example: Column("step s", lambda row: row.get("time/step"), ".2f")
    """

    header: str
    value: Callable[[Row], float | None]
    form: str


def metric(header: str, name: str, form: str) -> Column:
    """A column that shows the metric `name` as it is."""
    return Column(header, lambda row: row.get(name), form)


def _num_failed(row: Row) -> float:
    kinds = [name for name in row if name.startswith("errors/") and name != "errors/rate"]
    return sum(row[name] or 0.0 for name in kinds)


GENERATION: Final = (
    metric("step s", "time/step", ".2f"),
    metric("rollouts/s", "perf/rollouts_per_second", ".1f"),
    metric("output tok/s", "perf/throughput", ",.0f"),
    metric("prompt tok/s", "perf/prompt_throughput", ",.0f"),
    metric("completion tok", "completion_len/mean", ".1f"),
    metric("p50 s", "latency/p50", ".2f"),
    metric("p90 s", "latency/p90", ".2f"),
    metric("p99 s", "latency/p99", ".2f"),
    Column("failed", _num_failed, ".0f"),
)
"""Of the orchestrator; latencies are those of whole rollouts, scoring included."""

TRAINING: Final = (
    metric("step s", "time/step", ".3f"),
    metric("tok/s", "perf/throughput", ",.0f"),
    metric("MFU %", "perf/mfu", ".1f"),
    metric("MFU' %", "perf/mfu_published", ".1f"),
    metric("compute s", "time/forward_backward", ".3f"),
    metric("tok/s", "perf/throughput_compute", ",.0f"),
    metric("MFU %", "perf/mfu_compute", ".1f"),
    metric("MFU' %", "perf/mfu_published_compute", ".1f"),
    metric("publish s", "time/publish", ".3f"),
    metric("peak GiB", "perf/peak_memory_gib", ".2f"),
)
"""Of the trainer: the whole step, then its computation alone. MFU is known for GPUs whose peak is."""

TRAINING_NOTE: Final = """\
step: the whole loop, with the wait for a batch and the publication of weights. compute: forward, backward, optimizer.
MFU: causal attention, head on tokens in the loss. MFU': PRIME-RL's formula, all pairs of a row and head on all tokens.
Neither counts what is computed a second time. Peak: of the GPU's allocator; on a CPU, of the process."""


def table(title: str, rows: Sequence[Row], columns: Sequence[Column], *, num_warm_up: int = NUM_WARM_UP) -> str:
    """The lines of one table. A metric that a row does not have is a dash."""
    lines = [[title, *(column.header for column in columns)]]
    for number, row in enumerate(rows):
        name = f"step {number}" + (" (warm-up)" if number < num_warm_up else "")
        lines.append([name, *(_shown(column.value(row), column.form) for column in columns)])
    counted = [_counted(rows[num_warm_up:], column) for column in columns]
    for name, statistic in STATISTICS.items():
        shown = (
            _shown(statistic(values) if values else None, c.form) for values, c in zip(counted, columns, strict=True)
        )
        lines.append([name, *shown])
    return aligned(lines)


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a metric over the steps that count; one that every row has."""
    return fmean(row[name] or 0.0 for row in rows[NUM_WARM_UP:] or rows)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, the others to the right."""
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def _counted(rows: Sequence[Row], column: Column) -> list[float]:
    return [value for row in rows if (value := column.value(row)) is not None]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
