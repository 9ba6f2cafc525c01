"""What several runs show together. By itself, of runs that are over: python -m tests.chaos.report DIRECTORY"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.accounting import ledger_of, table
from tests.chaos.runs import Outcome

LAST: Final = 3
"""Steps whose mean reward is the final reward of a run."""


def final_reward(run: Outcome) -> float:
    return statistics.fmean(run.rewards[-LAST:])


def learned(runs: Sequence[Outcome]) -> float:
    """By how much the mean reward of the last steps is above that of the first, in the mean of the runs."""
    return statistics.fmean(final_reward(run) - statistics.fmean(run.rewards[:LAST]) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of the mean final rewards of two sets of runs."""

    value: float
    """Faulty minus clean."""
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:+.4f}, of a standard error of {self.standard_error:.4f}"


def difference(clean: Sequence[Outcome], faulty: Sequence[Outcome]) -> Difference:
    """The runs are independent samples, at least two of each."""
    sets = [[final_reward(run) for run in runs] for runs in (clean, faulty)]
    variance = sum(statistics.variance(rewards) / len(rewards) for rewards in sets)
    value = statistics.fmean(sets[1]) - statistics.fmean(sets[0])
    return Difference(value=value, standard_error=math.sqrt(variance))


def report(runs: Mapping[str, Sequence[Outcome]]) -> str:
    """Faults and what became of them; a line for each run; and the comparison. `runs`: clean and faulty ones."""
    lines = [table([ledger_of(run) for run in runs["faulty"]]), ""]
    lines.append(
        f"{'run':12} {'code':>4} {'seconds':>7} {'steps':>5} {'dispatched':>10}  reward: first, last, of each step"
    )
    for run in (*runs["clean"], *runs["faulty"]):
        rewards = run.rewards
        ends = (statistics.fmean(rewards[:LAST]), final_reward(run)) if rewards else (math.nan, math.nan)
        lines.append(
            f"{run.directory.name:12} {run.code:4} {run.seconds:7.1f} {len(rewards):5} {len(run.traces()):10}  "
            f"{ends[0]:.3f} {ends[1]:.3f}  " + " ".join(f"{reward:.2f}" for reward in rewards)
        )
    if all(len(of_kind) >= 2 and all(run.rewards for run in of_kind) for of_kind in runs.values()):
        lines.append(f"faulty minus clean: {difference(runs['clean'], runs['faulty'])}")
    return "\n".join(lines)


def main(root: Path) -> None:
    """Print the report of the runs in a directory; they are called clean-N and faulty-N."""
    kinds = ("clean", "faulty")
    print(report({kind: [Outcome.read(path) for path in sorted(root.glob(f"{kind}-*"))] for kind in kinds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
