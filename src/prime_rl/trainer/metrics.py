"""Per-token metrics of a step: means and maxima over all micro-batches of all ranks."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.streams import LossOutput


class MetricSums:
    """Sum, count and maximum of every metric, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = {}

    def add(self, output: LossOutput) -> None:
        """Take in the metrics of a micro-batch."""
        for name, values_N in output.metrics_N.items():
            self._pieces.setdefault(name, []).append(_sum_count_max(values_N, output.counted_N.get(name)))

    def summary(self, ranks: Ranks) -> dict[str, float]:
        """`<name>/mean` and `<name>/max` over the tokens that were counted on all ranks, which all call this.

        A metric that counted no token is left out. Ranks need not have seen the same metrics.
        """
        return merged(ranks.gathered(self._totals()))

    def _totals(self) -> dict[str, list[float]]:
        if not self._pieces:
            return {}
        rows = []
        for pieces in self._pieces.values():
            sums, counts, maxima = torch.stack(pieces).unbind(dim=1)
            rows.append(torch.stack([sums.sum(), counts.sum(), maxima.max()]))
        return dict(zip(self._pieces, torch.stack(rows).tolist(), strict=True))  # the only read of the device


def merged(of_ranks: Iterable[Mapping[str, list[float]]]) -> dict[str, float]:
    """Means and maxima of what each rank has: name -> [sum, count, maximum]."""
    totals: dict[str, list[float]] = {}
    for of_rank in of_ranks:
        for name, (total, count, maximum) in of_rank.items():
            so_far = totals.setdefault(name, [0.0, 0.0, -math.inf])
            # Once a NaN, always a NaN: max() would drop it, depending on its place.
            highest = maximum if math.isnan(maximum) or maximum > so_far[2] else so_far[2]
            totals[name] = [so_far[0] + total, so_far[1] + count, highest]
    summary: dict[str, float] = {}
    for name, (total, count, maximum) in totals.items():
        if count:
            summary[f"{name}/mean"] = total / count
            summary[f"{name}/max"] = maximum
    return summary


def _sum_count_max(values_N: Tensor, counted_N: Tensor | None) -> Tensor:
    """Float64 [3]; the maximum of no value is -inf."""
    values_N = values_N.detach().double()
    lowest = values_N.new_full((1,), -torch.inf)
    if counted_N is None:
        count = values_N.new_full((), values_N.numel())
        return torch.stack([values_N.sum(), count, torch.cat([values_N, lowest]).max()])
    counted = torch.where(counted_N, values_N, 0.0).sum()
    highest = torch.cat([torch.where(counted_N, values_N, -torch.inf), lowest]).max()
    return torch.stack([counted, counted_N.sum().double(), highest])
