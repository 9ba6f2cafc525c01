import math
from types import SimpleNamespace

import pytest
import torch

from prime_rl.trainer.metrics import MetricSums
from prime_rl.trainer.ranks import ALONE
from prime_rl.trainer.streams import LossOutput


def sums_of(*rows):
    """Rows are {name: values} or {name: (values, counted)}."""
    sums = MetricSums()
    for row in rows:
        values = {name: value if isinstance(value, tuple) else (value, None) for name, value in row.items()}
        sums.add(
            LossOutput(
                sums={},
                metrics_N={name: torch.tensor(numbers) for name, (numbers, _) in values.items()},
                counted_N={name: torch.tensor(mask).bool() for name, (_, mask) in values.items() if mask is not None},
            )
        )
    return sums


def test_means_and_maxima_are_those_of_all_tokens_of_all_micro_batches():
    sums = sums_of({"entropy": [1.0, 2.0, 3.0]}, {"entropy": [-6.0]}, {"entropy": []})
    assert sums.summary(ALONE) == {"entropy/mean": 0, "entropy/max": 3}


def test_tokens_that_are_not_counted_leave_no_trace():
    sums = sums_of({"nll": ([1.0, 9.0, 3.0], [1, 0, 1])}, {"nll": ([math.nan, -5.0], [0, 0])})
    assert sums.summary(ALONE) == {"nll/mean": 2, "nll/max": 3}


def test_a_metric_of_no_token_is_left_out():
    sums = sums_of({"nll": ([1.0], [0]), "entropy": []})
    assert sums.summary(ALONE) == {}
    assert MetricSums().summary(ALONE) == {}


def test_a_value_that_is_not_a_number_is_not_averaged_away():
    for rows in (({"e": [math.nan]}, {"e": [1.0]}), ({"e": [1.0]}, {"e": [math.nan]})):
        summary = sums_of(*rows).summary(ALONE)
        assert math.isnan(summary["e/mean"])
        assert math.isnan(summary["e/max"])


def test_ranks_add_up_also_where_they_saw_other_metrics():
    others = [{"e": [6.0, 1.0, 6.0], "only there": [1.0, 2.0, 0.75]}, {"e": [0.0, 0.0, -math.inf]}]
    ranks = SimpleNamespace(gathered=lambda mine: [mine, *others])
    summary = sums_of({"e": [1.0, 2.0]}).summary(ranks)
    assert summary == pytest.approx({"e/mean": 3, "e/max": 6, "only there/mean": 0.5, "only there/max": 0.75})


def test_a_metric_that_carries_gradients_is_detached():
    sums, entropy = MetricSums(), torch.ones(2, requires_grad=True)
    sums.add(LossOutput(sums={}, metrics_N={"entropy": entropy * 2}))
    assert sums.summary(ALONE) == {"entropy/mean": 2, "entropy/max": 2}
