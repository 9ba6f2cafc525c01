"""What `benchmarks/checkpoint.py` makes of the times of a run."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def checkpoint(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("checkpoint")


def test_a_checkpoint_counts_for_the_period_behind_its_row(checkpoint):
    times, now = [], 0.0
    for step in range(21):
        times.append(now)
        now += 3.0 if (step + 1) % checkpoint.INTERVAL == 0 else 1.0
    found = checkpoint.figures(times)
    assert (found.other, found.saving) == (1.0, 3.0)
    assert found.all == pytest.approx((10 * 1.0 + 3 * 3.0) / 13)


def test_the_table_measures_by_the_run_that_saves_nothing(checkpoint):
    rows = {
        "no save": checkpoint.Figures(other=2.0, saving=2.0, all=2.0),
        "synchronous": checkpoint.Figures(other=2.0, saving=3.0, all=2.2),
    }
    assert checkpoint.table(rows).splitlines()[-1].split() == [
        *("synchronous", "2.000", "s", "3.000", "s", "1.50", "2.200", "s", "1.10")
    ]
