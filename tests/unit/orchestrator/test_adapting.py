from collections import Counter

from tests.doubles.state import KEYS, example_of, state_of

from prime_rl.environments.fingerprints import fingerprint
from prime_rl.orchestrator.adapting import from_the_start, knows_examples, with_data, without_buffer, without_groups
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.groups import Example
from prime_rl.orchestrator.limits import SchedulerLimits
from prime_rl.orchestrator.scheduler import Scheduler

SIZES = {"a": 10, "b": 10}


def prints_of(env, order):
    """The fingerprints of a data set that holds the examples of before in another order; None: another example."""
    return [fingerprint(example_of(env if index is not None else "new", index), KEYS) for index in order]


def lost_of(state, before):
    """Rollouts that were cancelled besides, by why."""
    return Counter({end.why: n for end, n in state.scheduler.ends}) - Counter(
        {end.why: n for end, n in before.scheduler.ends}
    )


def check_counts(state):
    """A scheduler that goes on from it counts every rollout."""
    limits = SchedulerLimits(batch_target=2, rollouts_per_group=2, max_async_level=2, max_off_policy_steps=8)
    scheduler = Scheduler(limits)
    scheduler.restore(state.scheduler)
    counters = scheduler.counters
    assert counters.dispatched == counters.ends.total() + scheduler.num_in_flight + scheduler.num_held


def test_the_same_data_leave_the_state_as_it_is():
    state = state_of()
    assert with_data(state, SIZES, {}) is state
    prints = {env: prints_of(env, range(10)) for env in SIZES}
    assert with_data(state, SIZES, prints) is state
    assert knows_examples(state) == {"a", "b"}


def test_examples_of_changed_data_are_recognised_wherever_they_are():
    state = state_of()
    orders = {env: [None, *reversed(range(10))] for env in SIZES}
    prints = {env: prints_of(env, order) for env, order in orders.items()}
    changed = with_data(state, {"a": 11, "b": 11}, prints)
    place = {env: {index: at for at, index in enumerate(order)} for env, order in orders.items()}
    for before, after in zip(
        [group for group in state.scheduler.groups if group.results], changed.scheduler.groups, strict=True
    ):
        assert after.example == Example(env=before.example.env, index=place[before.example.env][before.example.index])
        assert after.results == before.results
    unknown = [group for group in state.scheduler.groups if not group.results]
    assert lost_of(changed, state) == {"data_changed": sum(len(group.in_flight) for group in unknown)}
    assert changed.buffer.owed == [group.example.env for group in unknown], (
        "others of their environments take their place"
    )
    for env, pool in state.buffer.pools.items():
        assert changed.buffer.pools[env].aside == {place[env][index]: known for index, known in pool.aside.items()}
        assert changed.buffer.pools[env].epoch == pool.epoch
    check_counts(changed)
    buffer = Buffer({"a": 11, "b": 11}, seed=3)
    buffer.restore(changed.buffer)
    buffer._owed.clear()
    ((env, aside),) = [(env, index) for env, pool in changed.buffer.pools.items() for index in pool.aside]
    drawn = [one.index for one in (buffer.next() for _ in range(44)) if one.env == env]
    assert set(drawn[:10]) == set(drawn[10:20]) == set(range(11)) - {aside}, "whole epochs"


def test_examples_that_are_gone_leave_nothing():
    state = state_of()
    changed = with_data(state, {"a": 3, "b": 3}, {env: prints_of(env, [None] * 3) for env in SIZES})
    assert changed.scheduler.groups == changed.scheduler.again == []
    assert all(pool.aside == {} for pool in changed.buffer.pools.values())
    assert len(changed.buffer.owed) == len(state.buffer.owed) + len(state.scheduler.groups)
    check_counts(changed)


def test_an_environment_that_is_gone_takes_its_groups_with_it():
    state = state_of()
    changed = with_data(state, {"a": 10}, {})
    assert {group.example.env for group in changed.scheduler.groups} == {"a"}
    assert changed.buffer.pools.keys() == {"a"}
    check_counts(changed)


def test_without_groups_their_examples_come_again_first_and_without_a_buffer_nothing_does():
    state = state_of()
    examples = [group.example for group in state.scheduler.groups]
    without = without_groups(state, "why")
    assert (without.scheduler.groups, without.scheduler.again) == ([], examples)
    assert without.buffer == state.buffer
    check_counts(without)
    bare = without_buffer(state)
    assert (bare.scheduler.groups, bare.scheduler.again) == ([], [])
    assert bare.next_batch == 1
    check_counts(bare)
    buffer, fresh = Buffer(SIZES, seed=3), Buffer(SIZES, seed=3)
    buffer.restore(bare.buffer)
    assert [buffer.next() for _ in range(9)] == [fresh.next() for _ in range(9)]


def test_from_the_start_it_is_batch_0_and_what_is_known_of_examples_stays():
    state = state_of(num_batches=2)
    anew = from_the_start(state)
    assert (anew.next_batch, anew.scheduler.version, anew.progress.samples, anew.evaluation) == (0, 0, 0, None)
    assert set(anew.scheduler.counts.values()) == {0}
    assert anew.buffer == state.buffer
    assert anew.scheduler.again == [group.example for group in state.scheduler.groups]
    check_counts(anew)
