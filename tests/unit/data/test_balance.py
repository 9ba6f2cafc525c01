import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.data.balance import CostModel, balanced, first_fit
from prime_rl.errors import DataError


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def slowest_rows(loads: list[int], num_ranks: int) -> int:
    """Time of all micro-steps: rows are the costliest first, so the first of each `num_ranks` is its slowest."""
    return sum(loads[::num_ranks])


def optimum(lengths: np.ndarray, costs: np.ndarray, *, num_rows: int, num_ranks: int, capacity: int) -> int | None:
    """The least time of all placements, tried one by one; None when there is none."""
    best: int | None = None
    loads, room = [0] * num_rows, [capacity] * num_rows

    def place(index: int) -> None:
        nonlocal best
        if index == len(lengths):
            time = slowest_rows(sorted(loads, reverse=True), num_ranks)
            best = time if best is None else min(best, time)
            return
        tried = set()
        for row in range(num_rows):
            if room[row] < lengths[index] or (loads[row], room[row]) in tried:
                continue
            tried.add((loads[row], room[row]))
            loads[row], room[row] = loads[row] + int(costs[index]), room[row] - int(lengths[index])
            place(index + 1)
            loads[row], room[row] = loads[row] - int(costs[index]), room[row] + int(lengths[index])

    place(0)
    return best


def test_each_item_goes_into_the_first_bin_with_room():
    assert first_fit([3, 4, 1], capacity=4) == [[0, 2], [1]]
    assert first_fit([2, 3, 2, 1], capacity=4) == [[0, 2], [1, 3]]
    assert first_fit([], capacity=4) == []


def test_an_item_longer_than_a_bin_is_an_error():
    with pytest.raises(DataError, match="item 1 has 5 tokens, more than a row of 4"):
        first_fit([3, 5], capacity=4)


def test_costs_are_whole_numbers_relative_to_the_largest():
    costs = CostModel(linear=2.0, quadratic=1.0).relative(ints(1, 2, 4))  # 3, 8, 24
    assert costs.tolist() == [(1 << 30) // 8, -(-(1 << 30) // 3), 1 << 30]
    assert CostModel(linear=7e12).relative(ints(1, 4)).tolist() == [1 << 28, 1 << 30]


def test_tokens_in_the_loss_cost_more_than_others():
    costs = CostModel(linear=1.0, per_loss_token=2.0).relative(ints(8, 8, 4), ints(0, 4, 4))  # 8, 16, 12
    assert costs.tolist() == [1 << 29, 1 << 30, 3 << 28]


def test_documents_of_one_length_are_told_apart_by_their_cost():
    """Greedily, rows of 4 + 3 + 3 and 9 + 3 + 7; what may leave the slow one is the first of it, or the 3 or the 7."""
    _, loads = balanced(ints(4, 4, 4, 4, 4, 4), ints(4, 3, 9, 3, 3, 7), 2, 12)
    assert loads == [15, 14]


def test_a_long_document_is_computed_beside_many_short_ones():
    lengths = ints(8, 1, 1, 1, 1, 1, 1, 1, 1)
    bins, loads = balanced(lengths, CostModel(linear=1.0).relative(lengths), 2, 8)
    assert bins == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert loads == [1 << 30, 1 << 30]


def test_what_attends_quadratically_is_weighed_so():
    """By tokens, 4 + 4 would stand beside 8; by cost 8 is as much as four of 4."""
    lengths = ints(8, 4, 4, 4, 4)
    bins, _ = balanced(lengths, lengths**2, 2, 16)
    assert bins == [[0], [1, 2, 3, 4]]


def test_fewer_documents_than_ranks_leave_rows_empty():
    bins, loads = balanced(ints(3, 5), ints(3, 5), 4, 8)
    assert bins == [[1], [0], [], []]
    assert loads == [5, 3, 0, 0]


def test_a_placement_that_the_greedy_one_misses_is_taken_from_first_fit():
    """Greedily, rows of 6 + 3 and 5 + 4 leave no room for 2."""
    lengths = ints(6, 5, 4, 3, 2)
    bins, _ = balanced(lengths, lengths, 2, 10)
    assert sorted(sorted(lengths[members].tolist()) for members in bins) == [[2, 3, 5], [4, 6]]


CASES = st.tuples(
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.integers(12, 20),
    st.integers(2, 3),
    st.sampled_from([0.0, 0.1, 1.0]),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(CASES)
def test_small_cases_come_close_to_the_best_of_all_placements(case):
    lengths, capacity, num_ranks, quadratic = np.array(case[0], np.int64), *case[1:]
    costs = CostModel(linear=1.0, quadratic=quadratic).relative(lengths)
    bins, loads = balanced(lengths, costs, num_ranks, capacity)
    best = optimum(lengths, costs, num_rows=len(bins), num_ranks=num_ranks, capacity=capacity)
    assert best is not None
    assert best <= slowest_rows(loads, num_ranks) <= 1.15 * best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=120), st.integers(2, 8), st.integers(4000, 16000))
def test_every_document_has_one_row_and_no_row_overflows(found, num_ranks, capacity):
    lengths = np.array(found, np.int64)
    costs = CostModel(linear=1.0, quadratic=1 / 8000).relative(lengths)
    bins, loads = balanced(lengths, costs, num_ranks, capacity)
    assert len(bins) % num_ranks == 0
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(int(lengths[members].sum()) for members in bins) <= capacity
    assert loads == [int(costs[members].sum()) for members in bins]
    assert loads == sorted(loads, reverse=True)
    assert len(bins) < len(first_fit(sorted(found, reverse=True), capacity)) + num_ranks
    assert balanced(lengths, costs, num_ranks, capacity)[0] == bins


@pytest.mark.parametrize(
    ("num_ranks", "capacity", "most_idle"),
    [(2, 32_768, 0.002), (8, 8_192, 0.015), (16, 16_384, 0.01), (64, 16_384, 0.005)],
)
def test_lengths_as_rollouts_have_them_leave_little_time_idle(num_ranks, capacity, most_idle):
    """First-fit rows, dealt in turn, leave 2, 6, 21 and 42% idle."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.0, 1.0, 512), 16, 8192).astype(np.int64)
    _, loads = balanced(lengths, CostModel(linear=1.0, quadratic=1 / 8000).relative(lengths), num_ranks, capacity)
    assert 1 - sum(loads) / (num_ranks * slowest_rows(loads, num_ranks)) < most_idle


def test_documents_of_which_more_or_less_is_in_the_loss_leave_little_time_idle():
    """Half of them with a tenth of their tokens in it, half with nine tenths: dealt by length alone, 4% are idle."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.0, 1.0, 256), 16, 8192).astype(np.int64)
    loss_tokens = (lengths * np.where(np.arange(256) % 2, 0.1, 0.9)).astype(np.int64)
    costs = CostModel(linear=1.0, quadratic=1 / 8000, per_loss_token=0.35).relative(lengths, loss_tokens)
    by_length = CostModel(linear=1.35, quadratic=1 / 8000).relative(lengths)

    def idle(dealt_by: np.ndarray) -> float:
        bins, _ = balanced(lengths, dealt_by, 8, 16_384)
        times = np.array([costs[members].sum() for members in bins]).reshape(-1, 8)
        return 1 - times.sum() / (8 * times.max(axis=1).sum())

    assert idle(by_length) > 0.04
    assert idle(costs) < 0.01
