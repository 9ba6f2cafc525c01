import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.concurrency import Concurrency, RateLimit

BOTH = ("training", "evaluation")


def fill(concurrency, wanting):
    """Start what may start, in turns."""
    while any(started := [start(concurrency, name, wanting) for name in wanting]):
        assert started


def start(concurrency, name, wanting):
    if concurrency.may_start(name, wanting):
        concurrency.start(name)
        return True
    return False


def shared(bound, share=0.25, usual=100):
    return Concurrency(bound, {"training": 1 - share, "evaluation": share}, usual=usual)


def test_alone_a_source_has_all_the_room():
    for name in BOTH:
        concurrency = shared(16)
        fill(concurrency, [name])
        assert concurrency.in_flight == {name: 16}


def test_who_comes_later_is_given_its_share_as_rollouts_end_and_no_more():
    for first, second, share in (("training", "evaluation", 4), ("evaluation", "training", 12)):
        concurrency = shared(16)
        fill(concurrency, [first])
        assert not concurrency.may_start(second, BOTH), "there is no room yet"
        for _ in range(100):
            concurrency.end(first)
            fill(concurrency, BOTH)
            assert concurrency.in_flight.total() == 16
        assert concurrency.in_flight[second] == share


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(), bound=st.integers(2, 40), share=st.sampled_from([0.1, 0.25, 0.5]))
def test_neither_starves_whatever_ends_when(seed, bound, share):
    rng = random.Random(seed)
    concurrency = shared(bound, share)
    fill(concurrency, [rng.choice(BOTH)])
    for _ in range(20 * bound):
        running = [name for name in BOTH if concurrency.in_flight[name]]
        concurrency.end(rng.choice(running))
        fill(concurrency, rng.sample(BOTH, 2))
        assert concurrency.in_flight.total() <= bound
    assert all(concurrency.in_flight[name] >= concurrency.quota(name) for name in BOTH)
    assert all(concurrency.quota(name) >= 1 for name in BOTH)


def test_sources_take_turns_where_there_is_room_for_one():
    concurrency, started = shared(1), []
    for _ in range(6):
        (name, *_) = concurrency.next_of(BOTH)
        concurrency.start(name)
        assert concurrency.next_of(BOTH) == []
        started.append(name)
        concurrency.end(name)
    assert started == ["training", "evaluation"] * 3
    assert concurrency.next_of(["training"]) == ["training"]


def test_the_bound_can_be_changed_and_nothing_beyond_a_lower_one_is_ended():
    concurrency = shared(8)
    fill(concurrency, ["training"])
    concurrency.bound = 4
    for left in (7, 6, 5, 4):
        concurrency.end("training")
        assert concurrency.in_flight.total() == left
        assert not concurrency.may_start("training", ["training"])
    concurrency.end("training")
    assert concurrency.may_start("training", ["training"])
    concurrency.bound = 10
    fill(concurrency, ["training"])
    assert concurrency.in_flight.total() == 10


def test_without_a_bound_training_bounds_itself_and_an_evaluation_has_its_share_beside_it():
    concurrency = shared(None, share=0.2, usual=100)
    for _ in range(120):
        assert start(concurrency, "training", BOTH)
    fill(concurrency, ["evaluation"])
    assert concurrency.in_flight["evaluation"] == 5, "room for 125"
    for _ in range(120):
        concurrency.end("training")
    fill(concurrency, ["evaluation"])
    assert concurrency.in_flight["evaluation"] == 125
    assert start(concurrency, "training", BOTH)


def test_a_source_whose_rollouts_wait_for_each_other_has_room_for_as_many_whatever_the_other_wants():
    for bound in (9, 10, 40):
        concurrency = Concurrency(bound, {"training": 0.6, "evaluation": 0.4}, usual=1, least={"training": 8})
        assert concurrency.floor == 9
        fill(concurrency, ["evaluation"])
        for _ in range(bound):
            concurrency.end("evaluation")
            fill(concurrency, BOTH)
        expected = {9: (8, 1), 10: (8, 2), 40: (24, 16)}[bound]
        assert (concurrency.in_flight["training"], concurrency.in_flight["evaluation"]) == expected
    concurrency.bound = 4
    assert concurrency.bound == 9
    concurrency.bound = None
    assert concurrency.bound is None


def test_no_more_than_the_limit_start_in_any_minute():
    rate, now, starts = RateLimit(3), 100.0, []
    rng = random.Random(1)
    for _ in range(500):
        now += rng.expovariate(1 / 7)
        if rate.wait_s(now) == 0:
            rate.start(now)
            starts.append(now)
    assert max(sum(start <= other < start + 60 for other in starts) for start in starts) == 3
    assert len(starts) > 0.8 * 3 * (now - 100) / 60


def test_how_long_to_wait_is_told():
    rate = RateLimit(2)
    rate.start(10.0)
    assert rate.wait_s(11.0) == 0
    rate.start(15.0)
    assert rate.wait_s(20.0) == 50.0
    assert rate.wait_s(70.0) == 0
    rate.start(70.0)
    assert rate.wait_s(70.0) == pytest.approx(5.0)
