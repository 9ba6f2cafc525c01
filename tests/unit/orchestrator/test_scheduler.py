import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.scheduler import Example, Scheduler, SchedulerLimits

EXAMPLE = Example(env="e", index=0)


def scheduler_of(P=2, G=2, k=1, m=8, **limits):
    return Scheduler(
        SchedulerLimits(groups_per_batch=P, rollouts_per_group=G, max_async_level=k, max_off_policy_steps=m, **limits)
    )


def examples():
    numbers = count()
    return lambda: Example(env="e", index=next(numbers))


def dispatch_all(scheduler, source):
    dispatches = []
    while (dispatch := scheduler.next_dispatch(source)) is not None:
        dispatches.append(dispatch)
    return dispatches


def finish_all(scheduler, dispatches):
    for dispatch in dispatches:
        scheduler.succeed(dispatch.rollout_id, dispatch)


def test_the_window_holds_the_batches_that_may_run_ahead_and_no_more():
    for k in range(4):
        scheduler = scheduler_of(P=3, G=2, k=k)
        assert len(dispatch_all(scheduler, examples())) == 3 * 2 * (k + 1)


def test_at_level_zero_generation_and_training_alternate():
    scheduler, source = scheduler_of(k=0), examples()
    finish_all(scheduler, dispatch_all(scheduler, source))
    assert scheduler.take_batch() is not None
    assert dispatch_all(scheduler, source) == []
    assert scheduler.waits_for_weights
    scheduler.set_version(1)
    dispatches = dispatch_all(scheduler, source)
    assert len(dispatches) == 4
    assert {dispatch.version for dispatch in dispatches} == {1}


def test_a_batch_takes_the_oldest_finished_groups_and_keeps_groups_whole():
    scheduler, source = scheduler_of(P=2, G=2, k=1), examples()
    dispatches = dispatch_all(scheduler, source)
    by_example = {index: [d for d in dispatches if d.example.index == index] for index in range(4)}
    finish_all(scheduler, by_example[3] + by_example[1] + by_example[2][:1])
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.example.index for group in batch] == [1, 3]
    assert [[result.rollout_id for result in group.results] for group in batch] == [
        [dispatch.rollout_id for dispatch in by_example[index]] for index in (1, 3)
    ]
    assert scheduler.take_batch() is None


def test_a_batch_does_not_ship_before_the_weights_it_needs_are_served():
    scheduler, source = scheduler_of(P=1, G=1, k=1), examples()
    for batch in range(2):
        finish_all(scheduler, dispatch_all(scheduler, source))
        assert scheduler.take_batch() is not None, batch
    assert scheduler.next_batch == 2
    assert scheduler.waits_for_weights
    assert dispatch_all(scheduler, source) == []
    scheduler.set_version(1)
    finish_all(scheduler, dispatch_all(scheduler, source))
    assert scheduler.take_batch() is not None


def test_a_failed_rollout_is_tried_again_within_its_group():
    scheduler, source = scheduler_of(P=1, G=2, k=0, max_attempts=3), examples()
    first, second = dispatch_all(scheduler, source)
    scheduler.succeed(first.rollout_id, "first")
    assert scheduler.fail(second.rollout_id) == []
    (again,) = dispatch_all(scheduler, source)
    assert (again.example, again.attempt) == (second.example, 2)
    scheduler.succeed(again.rollout_id, "again")
    (group,) = scheduler.take_batch()
    assert group.results == ["first", "again"]


def test_a_group_whose_rollout_fails_too_often_is_given_up_for_another_example():
    scheduler, source = scheduler_of(P=1, G=2, k=0, max_attempts=2), examples()
    first, second = dispatch_all(scheduler, source)
    assert scheduler.fail(second.rollout_id) == []
    (again,) = dispatch_all(scheduler, source)
    assert scheduler.fail(again.rollout_id) == [first.rollout_id]
    scheduler.succeed(first.rollout_id, "late, and ignored")
    others = dispatch_all(scheduler, source)
    assert {dispatch.example.index for dispatch in others} == {1}
    assert scheduler.counters.groups_given_up == 1
    finish_all(scheduler, others)
    assert [group.example.index for group in scheduler.take_batch()] == [1]


def test_a_failure_that_is_not_the_examples_fault_costs_no_attempt():
    scheduler, source = scheduler_of(P=1, G=1, k=0, max_attempts=1), examples()
    (dispatch,) = dispatch_all(scheduler, source)
    for _ in range(5):
        assert scheduler.fail(dispatch.rollout_id, counts=False) == []
        (dispatch,) = dispatch_all(scheduler, source)
    assert dispatch.attempt == 1
    assert dispatch.example.index == 0


def test_groups_that_lived_through_too_many_updates_are_cancelled_and_their_examples_come_first():
    scheduler, source = scheduler_of(P=1, G=2, k=3, m=1), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[2:])
    assert [group.example.index for group in scheduler.take_batch()] == [1]
    assert [group.example.index for group in scheduler.take_batch()] == [2]
    assert scheduler.set_version(1) == []
    assert scheduler.set_version(2) == [first[0].rollout_id, first[1].rollout_id]
    assert scheduler.counters.groups_stale == 2, "the unfinished group and the finished one that was not shipped"
    again = dispatch_all(scheduler, source)
    assert [dispatch.example.index for dispatch in again[:4]] == [0, 0, 3, 3]
    assert {dispatch.version for dispatch in again} == {2}


def test_no_more_rollouts_are_in_flight_than_allowed():
    scheduler, source = scheduler_of(P=4, G=2, k=1, max_in_flight=3), examples()
    dispatches = dispatch_all(scheduler, source)
    assert len(dispatches) == 3
    scheduler.succeed(dispatches[0].rollout_id, None)
    assert len(dispatch_all(scheduler, source)) == 1


def test_nothing_is_generated_beyond_the_last_batch():
    scheduler, source = scheduler_of(P=2, G=2, k=3, max_batches=1), examples()
    dispatches = dispatch_all(scheduler, source)
    assert len(dispatches) == 4
    finish_all(scheduler, dispatches)
    assert scheduler.take_batch() is not None
    assert scheduler.is_done
    assert not scheduler.waits_for_weights
    assert dispatch_all(scheduler, source) == []
    assert scheduler.take_batch() is None


class Simulation:
    """Random timings of rollouts, failures, the trainer and weight updates around a scheduler.

    A rollout's tokens are sampled by the versions served while it runs; the trainer turns shipped batches into weights
    in order, and the server may skip versions.
    """

    def __init__(self, seed, scheduler, failure_rate):
        self.random = random.Random(seed)
        self.scheduler = scheduler
        self.failure_rate = failure_rate
        self.source = examples()
        self.running = {}
        self.ended = []
        self.shipped = []
        self.trained = 0
        self.gaps = []

    def step(self):
        event = self.random.choice(["dispatch", "finish", "finish", "train", "update", "ship"])
        getattr(self, event)()
        counters = self.scheduler.counters
        assert counters.dispatched == counters.succeeded + counters.failed + counters.cancelled + len(self.running)
        assert self.scheduler.num_in_flight == len(self.running)
        assert self.scheduler.num_active_groups <= max(self.scheduler.window, self.most_active_before)

    most_active_before = 0

    def dispatch(self):
        for dispatch in dispatch_all(self.scheduler, self.source):
            self.running[dispatch.rollout_id] = [dispatch.version]
        self.most_active_before = self.scheduler.num_active_groups

    def finish(self):
        if not self.running:
            return
        rollout_id = self.random.choice(list(self.running))
        versions = self.running.pop(rollout_id)
        self.ended.append(rollout_id)
        if self.random.random() < self.failure_rate:
            self.cancel(self.scheduler.fail(rollout_id, counts=self.random.random() < 0.8))
        else:
            self.scheduler.succeed(rollout_id, versions)

    def cancel(self, rollout_ids):
        for rollout_id in rollout_ids:
            del self.running[rollout_id]
            self.ended.append(rollout_id)

    def train(self):
        self.trained = min(self.trained + 1, len(self.shipped))

    def update(self):
        if self.trained > self.scheduler.version:
            version = self.random.randint(self.scheduler.version + 1, self.trained)
            for versions in self.running.values():
                versions.append(version)
            self.cancel(self.scheduler.set_version(version))

    def ship(self):
        batch = self.scheduler.take_batch()
        if batch is not None:
            step = len(self.shipped)
            self.shipped.append(batch)
            self.gaps += [step - version for group in batch for versions in group.results for version in versions]


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("m", [0, 1, 8])
def test_over_ten_thousand_random_events_the_bound_holds_and_each_rollout_ends_once(k, m):
    scheduler = scheduler_of(P=3, G=2, k=k, m=m, max_attempts=2)
    simulation = Simulation(seed=f"{k}/{m}", scheduler=scheduler, failure_rate=0.1)
    for _ in range(10_000):
        simulation.step()
    assert len(simulation.ended) == len(set(simulation.ended))
    assert sorted([*simulation.ended, *simulation.running]) == list(range(scheduler.counters.dispatched))
    assert len(simulation.shipped) > 20
    assert min(simulation.gaps) >= 0
    assert max(simulation.gaps) <= (k + m if k else 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(),
    P=st.integers(1, 4),
    G=st.integers(1, 3),
    k=st.integers(0, 3),
    m=st.integers(0, 3),
    batches=st.integers(1, 6),
    max_in_flight=st.none() | st.integers(3, 8),
    failure_rate=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_every_run_comes_to_its_end_within_the_bound(seed, P, G, k, m, batches, max_in_flight, failure_rate):
    scheduler = scheduler_of(P=P, G=G, k=k, m=m, max_batches=batches, max_in_flight=max_in_flight)
    simulation = Simulation(seed, scheduler, failure_rate)
    for _ in range(100_000):
        if scheduler.is_done:
            break
        simulation.step()
    assert len(simulation.shipped) == batches
    assert max(simulation.gaps) <= (k + m if k else 0)


def test_a_benchmark_runs_at_the_concurrency_of_a_run_whose_trainer_takes_no_time_until_its_last_batch():
    scheduler, source = scheduler_of(P=2, G=2, k=1, max_batches=3, trains=False), examples()
    in_flight = dispatch_all(scheduler, source)
    for number in range(3):
        assert len(in_flight) == 2 * 2 * 2
        finish_all(scheduler, in_flight[:4])
        assert scheduler.take_batch() is not None
        assert not scheduler.waits_for_weights
        assert scheduler.is_done == (number == 2)
        in_flight = in_flight[4:] + dispatch_all(scheduler, source)
    assert {dispatch.version for dispatch in in_flight} == {0}
    assert scheduler.take_batch() is None


def test_a_synchronous_benchmark_starts_a_batch_when_the_last_one_is_complete():
    scheduler, source = scheduler_of(P=1, G=3, k=0, max_batches=2, trains=False), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[:2])
    assert dispatch_all(scheduler, source) == []
    finish_all(scheduler, first[2:])
    assert scheduler.take_batch() is not None
    assert len(dispatch_all(scheduler, source)) == 3
