import itertools

import pytest

from prime_rl.inference.engine.graphs import Graphs, batch_sizes


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_batch_sizes_end_with_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_a_batch_is_padded_by_a_quarter_at_most_beyond_the_smallest() -> None:
    sizes = batch_sizes(1000)
    assert sizes[-1] == 1000
    assert all(after <= before * 1.25 for before, after in itertools.pairwise(sizes) if before >= 32)
    assert len(sizes) < 50


def test_without_graphs_the_function_is_called_with_the_number_of_rows() -> None:
    calls: list[int] = []
    graphs = Graphs(calls.append, [4, 8], eager=True)
    assert graphs.size_for(3) == 3
    graphs(3)
    assert calls == [3]
