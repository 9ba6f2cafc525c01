"""Which document goes into which row. Numbers only; pure and deterministic.

Rows are computed in micro-steps, one row on each rank at a time, and every rank waits for the slowest: what is made
small is the sum over micro-steps of the costliest row. It is a bin packing problem and a scheduling problem at once,
both NP-hard; a greedy placement is refined by single moves and swaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prime_rl.errors import DataError

Ints = NDArray[np.int64]

_UNIT: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Time of a sequence of L tokens, N of them in the loss: linear * L + quadratic * L^2 + per_loss_token * N.

    In any unit; a row costs what its sequences do.
    """

    linear: float
    quadratic: float = 0.0
    per_loss_token: float = 0.0

    def __post_init__(self) -> None:
        assert self.linear > 0, "every token costs something"
        assert self.quadratic >= 0
        assert self.per_loss_token >= 0

    def relative(self, lengths: Ints, loss_tokens: Ints | int = 0) -> Ints:
        """Cost of each sequence in units of 2^-30 of the largest: whole numbers, so that all ranks add up the same.

        `loss_tokens`: how many tokens of each are in the loss.
        """
        costs = self.linear * lengths + self.quadratic * lengths.astype(np.float64) ** 2
        costs = costs + self.per_loss_token * loss_tokens
        relative: Ints = np.ceil(costs / costs.max() * _UNIT).astype(np.int64)
        return relative


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` by bin: each goes, in the given order, into the first bin with room for it.

    Example: first_fit([3, 4, 1], capacity=4) == [[0, 2], [1]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        if length > capacity:
            raise DataError(f"item {index} has {length} tokens, more than a row of {capacity}")
        target = next((number for number, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return bins


def balanced(lengths: Ints, costs: Ints, num_ranks: int, capacity: int) -> tuple[list[list[int]], list[int]]:
    """Indices of documents by row, and the rows' costs, the costliest first; `num_ranks` in a line make a micro-step.

    The number of rows is the smallest multiple of `num_ranks` for which a placement was found; where documents are few,
    rows at the end are empty. No length may be above `capacity`.
    """
    by_length = np.argsort(-lengths, kind="stable")
    first_fits = [[int(by_length[i]) for i in members] for members in first_fit(lengths[by_length].tolist(), capacity)]
    fewest = -(-int(lengths.sum()) // capacity)
    num_rows = -(-fewest // num_ranks) * num_ranks
    while True:
        table = _Table(lengths, costs, num_rows, num_ranks, capacity)
        if table.place_greedily(by_length) or table.place(first_fits):
            break
        num_rows += num_ranks
    table.refine()
    return table.sorted()


class _Table:
    """Which document lies in which row. Rows are compared in groups of `num_ranks` alike in cost: the micro-steps."""

    MAX_TRIALS: Final = 4_000_000
    """Swaps that `refine` looks at: a tenth of a second or two, whatever the batch."""
    GOOD_ENOUGH: Final = 0.002
    """Share of time idle below which `refine` stops."""

    def __init__(self, lengths: Ints, costs: Ints, num_rows: int, num_ranks: int, capacity: int) -> None:
        self._lengths = lengths
        self._costs = costs
        self._num_ranks = num_ranks
        self._capacity = capacity
        self._row_of = np.full(len(lengths), -1)
        self._loads = np.zeros(num_rows, np.int64)
        self._room = np.full(num_rows, capacity, np.int64)
        self._num_trials = 0

    def place_greedily(self, order: Ints) -> bool:
        """Each in turn to where it prolongs its micro-step least, and of those to the cheapest; False without room."""
        groups = np.arange(len(self._loads)) // self._num_ranks
        peaks = np.zeros(int(groups[-1]) + 1, np.int64)
        for document in order.tolist():
            rows = np.flatnonzero(self._room >= self._lengths[document])
            if not len(rows):
                return False
            grown = self._loads[rows] + self._costs[document]
            rises = np.maximum(grown - peaks[groups[rows]], 0)
            rows = rows[rises == rises.min()]
            row = int(rows[self._loads[rows].argmin()])
            self._put(document, row)
            peaks[groups[row]] = max(peaks[groups[row]], self._loads[row])
        return True

    def place(self, bins: Sequence[Sequence[int]]) -> bool:
        """Take rows that are given; False when they are too many."""
        if len(bins) > len(self._loads):
            return False
        self._row_of[:] = -1
        self._loads[:] = 0
        self._room[:] = self._capacity
        for row, members in enumerate(bins):
            for document in members:
                self._put(document, row)
        return True

    def refine(self) -> None:
        """Take documents out of the slowest rows, or swap them for cheaper ones, while that saves time."""
        while self._num_trials < self.MAX_TRIALS:
            order = np.argsort(-self._loads, kind="stable").reshape(-1, self._num_ranks)
            slowest = self._loads[order[:, 0]]
            idle = self._num_ranks * slowest - self._loads[order].sum(axis=1)
            if idle.sum() <= self.GOOD_ENOUGH * self._num_ranks * slowest.sum():
                return
            if not any(self._relieve(order, group) for group in np.argsort(-idle, kind="stable").tolist()):
                return

    def sorted(self) -> tuple[list[list[int]], list[int]]:
        """Documents by row, and the cost of each row, the costliest first."""
        order = np.argsort(-self._loads, kind="stable").tolist()
        bins: list[list[int]] = [[] for _ in order]
        for document, row in enumerate(self._row_of.tolist()):
            bins[row].append(document)
        return [bins[row] for row in order], self._loads[order].tolist()

    def _put(self, document: int, row: int) -> None:
        before = self._row_of[document]
        if before >= 0:
            self._loads[before] -= self._costs[document]
            self._room[before] += self._lengths[document]
        self._row_of[document] = row
        self._loads[row] += self._costs[document]
        self._room[row] -= self._lengths[document]

    def _relieve(self, order: Ints, group: int) -> bool:
        """Make the best change that takes cost off the slowest row of a group; False when none saves time.

        `order`: rows by micro-step, the slowest of each first. Suffixes: G documents given away by the slowest row, one
        of each length and cost; P their partners in a swap: every document, and for each row one of no length, for a
        move.
        """
        top, num_rows = int(order[group, 0]), len(self._loads)
        given_G = np.flatnonzero(self._row_of == top)
        kinds = np.stack([self._lengths[given_G], self._costs[given_G]])
        given_G = given_G[np.unique(kinds, axis=1, return_index=True)[1]]
        row_P = np.append(self._row_of, np.arange(num_rows))
        length_P = np.append(self._lengths, np.zeros(num_rows, np.int64))
        moved_GP = self._costs[given_G][:, None] - np.append(self._costs, np.zeros(num_rows, np.int64))
        fits_GP = self._lengths[given_G][:, None] - length_P <= self._room[row_P]
        self._num_trials += moved_GP.size
        allowed_GP = fits_GP & (moved_GP > 0) & (row_P != top)
        saved_GP = self._saved(order, group, row_P, moved_GP)
        # Where two rows are the slowest alike, relieving one saves nothing yet: then what evens rows out counts.
        evened_GP = moved_GP / _UNIT * (self._loads[top] - self._loads[row_P] - moved_GP)
        allowed_GP &= (saved_GP > 0) | ((saved_GP == 0) & (evened_GP > 0))
        if not allowed_GP.any():
            return False
        best_GP = allowed_GP & (saved_GP == saved_GP[allowed_GP].max())
        given, partner = np.unravel_index(np.where(best_GP, evened_GP, -np.inf).argmax(), best_GP.shape)
        self._put(int(given_G[given]), int(row_P[partner]))
        if partner < len(self._lengths):
            self._put(int(partner), top)
        return True

    def _saved(self, order: Ints, group: int, row_P: Ints, moved_GP: Ints) -> Ints:
        """Cost that all micro-steps together lose when the slowest row of a group gives so much to another row."""
        group_of = np.empty(len(self._loads), np.int64)
        group_of[order] = np.arange(len(order))[:, None]
        peaks = self._loads[order[:, 0]]
        # The group's costliest row besides its slowest and the one that is given to.
        rest = np.zeros(len(self._loads), np.int64)
        if self._num_ranks > 1:
            rest[:] = self._loads[order[group, 1]]
            rest[order[group, 1]] = self._loads[order[group, 2]] if self._num_ranks > 2 else 0
        here_P = group_of[row_P] == group
        grown_GP = self._loads[row_P] + moved_GP
        peak_GP = np.maximum(peaks[group] - moved_GP, rest[row_P])
        peak_GP = np.where(here_P, np.maximum(peak_GP, grown_GP), peak_GP)
        risen_GP = np.where(here_P, 0, np.maximum(grown_GP - peaks[group_of[row_P]], 0))
        saved: Ints = peaks[group] - peak_GP - risen_GP
        return saved
