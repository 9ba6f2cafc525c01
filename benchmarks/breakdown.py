"""Where the time of a run went, and who waited for whom.

    python benchmarks/breakdown.py outputs

Read from the metrics of trainer and orchestrator in the run directory.
"""

import sys
from pathlib import Path

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.view.breakdown import breakdown


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    paths = RunPaths(Path(sys.argv[1]))
    print(breakdown(read_metrics(paths.metrics("trainer")), read_metrics(paths.metrics("orchestrator"))))


if __name__ == "__main__":
    main()
