import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.environments.sizing import Sizing, SizingRules

RULES = SizingRules(most=4, rollouts_per_worker=10, max_lag_s=0.25, settle_s=10, idle_s=60)


def sized(sizing, now, num_workers, num_rollouts, lag_s=0.0):
    return sizing.size(now, num_workers=num_workers, num_rollouts=num_rollouts, lag_s=lag_s)


@pytest.mark.parametrize(("num_rollouts", "num_workers"), [(0, 1), (10, 1), (11, 2), (40, 4), (4000, 4)])
def test_a_pool_has_a_worker_for_every_so_many_rollouts_and_one_at_least(num_rollouts, num_workers):
    assert sized(Sizing(RULES), 0, 1, num_rollouts) == num_workers


def test_a_pool_shrinks_one_by_one_once_fewer_were_enough_for_a_while():
    sizing = Sizing(RULES)
    assert sized(sizing, 0, 1, 40) == 4
    assert sized(sizing, 1, 4, 20) == 4
    assert sized(sizing, 60, 4, 20) == 4
    assert sized(sizing, 61, 4, 20) == 3
    assert sized(sizing, 62, 3, 20) == 3
    assert sized(sizing, 122, 3, 20) == 2
    assert sized(sizing, 300, 2, 20) == 2


def test_a_peak_in_between_begins_the_wait_anew():
    sizing = Sizing(RULES)
    assert sized(sizing, 0, 4, 20) == 4
    assert sized(sizing, 50, 4, 40) == 4
    assert sized(sizing, 70, 4, 20) == 4
    assert sized(sizing, 129, 4, 20) == 4
    assert sized(sizing, 130, 4, 20) == 3


def test_workers_that_are_late_carry_fewer_rollouts_from_then_on():
    sizing = Sizing(RULES)
    assert sized(sizing, 0, 1, 9) == 1
    assert sized(sizing, 1, 1, 9, lag_s=0.3) == 3
    assert sizing.capacity == 4
    assert sized(sizing, 5, 3, 9, lag_s=0.3) == 3, "the new ones have not had time to help"
    assert sized(sizing, 200, 3, 9) == 3, "calm, because there are three"
    assert sized(sizing, 201, 3, 13) == 4


def test_lateness_without_rollouts_to_share_starts_nobody():
    assert sized(Sizing(RULES), 0, 1, 1, lag_s=9.0) == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 200), st.floats(0, 2)), min_size=1, max_size=60
    )
)  # fmt: skip
def test_whatever_happens_there_is_one_and_never_more_than_the_most(events):
    sizing, now, num_workers = Sizing(RULES), 0.0, 1
    for wait_s, num_rollouts, lag_s in events:
        now += wait_s
        wanted = sized(sizing, now, num_workers, num_rollouts, lag_s)
        assert 1 <= wanted <= RULES.most
        assert wanted >= num_workers - 1, "one by one"
        assert wanted >= min(math.ceil(num_rollouts / RULES.rollouts_per_worker), RULES.most, num_workers + 1)
        num_workers = wanted
