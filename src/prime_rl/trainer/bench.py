"""`trainer --bench` and `sft --bench`: what is there before the measured steps, and the table after them.

The steps are those of a real run (`config.bench.measured`); everything shown is read from their metrics file.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from prime_rl.config.trainer import BenchConfig, SFTConfig, TrainerConfig
from prime_rl.errors import ArtifactError
from prime_rl.monitors.base import read_metrics
from prime_rl.monitors.tables import TRAINING, TRAINING_NOTE, Row, table
from prime_rl.paths import RunPaths


def clear(config: TrainerConfig | SFTConfig) -> None:
    """Remove what an earlier benchmark has left where `config`, already `measured`, is to write."""
    paths = RunPaths(config.output_dir)
    shutil.rmtree(paths.weights, ignore_errors=True)
    paths.metrics("trainer").unlink(missing_ok=True)


def report(name: str, config: TrainerConfig | SFTConfig) -> str:
    """The table of the steps that were measured, which are written to `bench.output_json` too; weights are removed.

    Raises: ArtifactError where that file cannot be written.
    """
    assert config.bench is not None
    paths = RunPaths(config.output_dir)
    rows = read_metrics(paths.metrics("trainer"))
    shutil.rmtree(paths.weights, ignore_errors=True)  # nobody will read them
    if config.bench.output_json is not None:
        _write(config.bench.output_json, summary(name, config.model.name, config.bench, rows))
    shown = table("training", rows, TRAINING, num_warm_up=config.bench.warm_up)
    return f"{shown}\n\n{TRAINING_NOTE}"


def summary(name: str, model: str, bench: BenchConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """What is written as JSON: the rows of all steps, and mean and median of every metric over those that count."""
    counted = rows[bench.warm_up :]
    names = sorted({key for row in counted for key in row} - {"step", "time"})
    values: Mapping[str, list[float]] = {
        key: [value for row in counted if (value := row.get(key)) is not None] for key in names
    }
    return {
        "command": name,
        "model": model,
        "warm_up": bench.warm_up,
        "steps": [dict(row) for row in rows],
        "mean": {key: fmean(found) for key, found in values.items() if found},
        "median": {key: median(found) for key, found in values.items() if found},
    }


def _write(file: Path, content: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{file} cannot be written: {error.strerror}; set bench.output_json to another") from None
