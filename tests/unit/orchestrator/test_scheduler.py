from itertools import count

import pytest

from prime_rl.errors import Hopeless
from prime_rl.orchestrator.groups import End, Example
from prime_rl.orchestrator.limits import SchedulerLimits
from prime_rl.orchestrator.scheduler import HOPELESS_GROUPS, Scheduler

EXAMPLE = Example(env="e", index=0)


def scheduler_of(P=2, G=2, k=1, m=8, ended=None, replaced=None, **limits):
    """A scheduler; all ends are put into the list `ended`, examples to be replaced into `replaced`."""
    limits = SchedulerLimits(batch_target=P, rollouts_per_group=G, max_async_level=k, max_off_policy_steps=m, **limits)
    return Scheduler(limits, *([].append if one is None else one.append for one in (ended, replaced)))


def examples(envs=("e",)):
    numbers = count()
    return lambda: Example(env=envs[(number := next(numbers)) % len(envs)], index=number)


def dispatch_all(scheduler, source, **arguments):
    dispatches = []
    while (dispatch := scheduler.next_dispatch(source, **arguments)) is not None:
        dispatches.append(dispatch)
    return dispatches


def finish_all(scheduler, dispatches, **accepted):
    """The results are the dispatches; groups that are complete are accepted."""
    for dispatch in dispatches:
        group = scheduler.succeed(dispatch.rollout_id, dispatch)
        if group is not None:
            scheduler.accept(group.number, group.results, **accepted)


def in_flight_of(ended):
    return [one.dispatch.rollout_id for one in ended if one.result is None]


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
    assert [[result.rollout_id for result in group] for group in batch] == [
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
    ended = []
    scheduler, source = scheduler_of(P=1, G=2, k=0, max_attempts=3, ended=ended), examples()
    first, second = dispatch_all(scheduler, source)
    assert scheduler.succeed(first.rollout_id, "first") is None
    scheduler.fail(second.rollout_id, "what it was", "timeout")
    assert [(one.dispatch, one.end, one.result) for one in ended] == [
        (second, End(kind="failed", why="timeout"), "what it was")
    ]
    (again,) = dispatch_all(scheduler, source)
    assert (again.example, again.attempt, again.place) == (second.example, 2, 1)
    group = scheduler.succeed(again.rollout_id, "again")
    assert (group.example, group.results) == (first.example, ["first", "again"])


def test_a_group_whose_rollout_fails_too_often_is_given_up_for_another_example():
    ended, replaced = [], []
    scheduler, source = scheduler_of(P=1, G=2, k=0, max_attempts=2, ended=ended, replaced=replaced), examples()
    first, second = dispatch_all(scheduler, source)
    scheduler.fail(second.rollout_id, None, "scorer")
    (again,) = dispatch_all(scheduler, source)
    assert replaced == []
    scheduler.fail(again.rollout_id, "failed again", "scorer")
    assert replaced == [first.example]
    assert [str(one.end) for one in ended] == ["failed (scorer)", "failed (scorer)", "cancelled (given_up)"]
    assert ended[-1].dispatch == first
    assert scheduler.succeed(first.rollout_id, "late, and ignored") is None
    others = dispatch_all(scheduler, source)
    assert {dispatch.example.index for dispatch in others} == {1}
    assert scheduler.counters.groups_given_up == 1
    finish_all(scheduler, others)
    assert [[one.example.index for one in group] for group in scheduler.take_batch()] == [[1, 1]]


def test_a_failure_that_is_not_the_examples_fault_costs_no_attempt():
    scheduler, source = scheduler_of(P=1, G=1, k=0, max_attempts=1), examples()
    (dispatch,) = dispatch_all(scheduler, source)
    for _ in range(5):
        scheduler.fail(dispatch.rollout_id, None, "inference", counts=False)
        (dispatch,) = dispatch_all(scheduler, source)
    assert dispatch.attempt == 1
    assert dispatch.example.index == 0


def test_a_group_that_was_scored_as_one_starts_anew_when_a_rollout_of_it_fails_afterwards():
    ended = []
    scheduler, source = scheduler_of(P=1, G=3, k=2, m=1, ended=ended, max_attempts=2), examples()
    first = [one for one in dispatch_all(scheduler, source) if one.group == 0]
    scheduler.set_version(0)
    scheduler.succeed(first[0].rollout_id, "scored with the others")
    scheduler.fail(first[1].rollout_id, "not a number", "bad_reward", is_whole=True)
    assert [(one.dispatch, str(one.end), one.result) for one in ended] == [
        (first[1], "failed (bad_reward)", "not a number"),
        (first[2], "cancelled (group_failed)", None),
        (first[0], "cancelled (group_failed)", "scored with the others"),
    ]
    assert scheduler.num_held == 0
    assert scheduler.succeed(first[2].rollout_id, "late, and ignored") is None
    again = dispatch_all(scheduler, source)
    assert [(one.group, one.place, one.attempt, one.example) for one in again] == [
        (0, place, 2, first[0].example) for place in range(3)
    ]
    scheduler.fail(again[2].rollout_id, None, "bad_reward", is_whole=True)
    assert scheduler.counters.groups_given_up == 1, "an attempt is one of the whole group, whichever rollout failed"


def test_a_group_that_starts_anew_is_as_old_as_what_it_then_holds():
    scheduler, source = scheduler_of(P=1, G=1, k=2, m=1), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[1:])
    for _ in range(2):
        assert scheduler.take_batch() is not None
    scheduler.set_version(1)
    scheduler.fail(first[0].rollout_id, None, "scorer", is_whole=True)
    again = next(one for one in dispatch_all(scheduler, source) if one.group == 0)
    assert again.version == 1
    scheduler.set_version(2)
    assert scheduler.is_in_flight(again.rollout_id), "the tokens of weights 0 are gone, and with them their age"
    scheduler.set_version(2)
    assert scheduler.counters.groups_stale == 0


def test_groups_that_lived_through_too_many_updates_are_cancelled_and_their_examples_come_first():
    ended = []
    scheduler, source = scheduler_of(P=1, G=2, k=3, m=1, ended=ended), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[2:])
    assert [group[0].example.index for group in scheduler.take_batch()] == [1]
    assert [group[0].example.index for group in scheduler.take_batch()] == [2]
    scheduler.set_version(1)
    assert {one.end for one in ended} == {End(kind="used")}
    ended.clear()
    scheduler.set_version(2)
    assert in_flight_of(ended) == [first[0].rollout_id, first[1].rollout_id]
    assert [one.result for one in ended] == [None, None, *first[6:]]
    assert {one.end for one in ended} == {End(kind="cancelled", why="stale")}
    assert scheduler.counters.groups_stale == 2, "the unfinished group and the finished one that was not shipped"
    again = dispatch_all(scheduler, source)
    assert [dispatch.example.index for dispatch in again[:4]] == [0, 0, 3, 3]
    assert {dispatch.version for dispatch in again} == {2}


def test_a_filtered_group_counts_for_no_batch_and_another_example_takes_its_place():
    ended = []
    scheduler, source = scheduler_of(P=1, G=2, k=0, ended=ended), examples()
    first = dispatch_all(scheduler, source)
    scheduler.succeed(first[0].rollout_id, "a")
    group = scheduler.succeed(first[1].rollout_id, "b")
    assert dispatch_all(scheduler, source) == [], "it may still be accepted"
    scheduler.filter(group.number, "too_easy")
    assert [(one.result, str(one.end)) for one in ended] == [("a", "filtered (too_easy)"), ("b", "filtered (too_easy)")]
    others = dispatch_all(scheduler, source)
    assert [one.example.index for one in others] == [1, 1]
    scheduler.filter(group.number, "once more, and ignored")
    scheduler.accept(group.number, ["late", "and ignored"])
    finish_all(scheduler, others)
    assert scheduler.take_batch() is not None
    assert (scheduler.counters.groups_started, scheduler.counters.groups_filtered) == (2, 1)


def test_a_rollout_that_a_filter_leaves_out_ends_as_filtered_when_its_group_is_shipped():
    ended = []
    scheduler, source = scheduler_of(P=1, G=3, k=1, ended=ended), examples()
    dispatches = dispatch_all(scheduler, source)
    finish_all(scheduler, dispatches, filtered=["", "gibberish", ""])
    assert ended == []
    assert scheduler.num_held == 6
    assert len(scheduler.take_batch()[0]) == 3
    assert [str(one.end) for one in ended] == ["used", "filtered (gibberish)", "used"]
    assert [one.batch for one in ended] == [0, 0, 0]
    assert scheduler.num_held == 3


def run_filtered(groups, P=2):
    """Groups of two end so, in turn: what leaves each of their rollouts out, or why the whole group is filtered."""
    replaced = []
    scheduler, source = scheduler_of(P=P, G=2, k=0, replaced=replaced), examples(envs=("a", "b"))
    groups = iter(groups)
    while dispatches := dispatch_all(scheduler, source):
        for dispatch in dispatches:
            group = scheduler.succeed(dispatch.rollout_id, dispatch)
            if group is None:
                continue
            try:
                how = next(groups)
            except StopIteration:
                return scheduler, replaced
            if isinstance(how, str):
                scheduler.filter(group.number, how)
            else:
                scheduler.accept(group.number, group.results, filtered=how)
        scheduler.take_batch()
        scheduler.set_version(scheduler.next_batch)
    raise AssertionError("there is always more to dispatch")


def test_groups_in_a_row_without_anything_to_train_on_end_the_run_in_words_and_a_good_one_between_them_does_not():
    empty, full = ["zero_advantage"] * 2, ["zero_advantage", ""]
    most = [empty, "too_hard"] * (HOPELESS_GROUPS // 2)
    scheduler, _ = run_filtered([*most[:-2], full, *most[:-2], empty])
    assert scheduler.next_batch == 1
    with pytest.raises(
        Hopeless,
        match=r"^300 groups in a row had nothing to train on: of the rollouts, 300 as too_hard and 300 as "
        r"zero_advantage were left out; look at",
    ):
        run_filtered([*most, empty, empty])


def test_the_batch_behind_one_of_which_nothing_is_left_ships_at_once():
    scheduler, source = scheduler_of(P=2, G=1, k=1), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[:2], filtered=["too_long"])
    finish_all(scheduler, first[2:])
    assert [group[0].example.index for group in scheduler.take_batch()] == [2, 3]
    assert scheduler.counters.groups_filtered == 2
    assert len(dispatch_all(scheduler, source)) == 2


def test_difficulty_filtering_without_end_ends_the_run_and_is_told_before():
    scheduler, _ = run_filtered(["too_hard"] * 7)
    assert scheduler.left_out == (
        "7 groups in a row had nothing to train on: of the rollouts, 14 as too_hard were left out"
    )
    with pytest.raises(Hopeless, match=r"^300 groups in a row .* 600 as too_hard were left out.*online_difficulty"):
        run_filtered(["too_hard"] * 301)
    run_filtered(["too_hard"] * 999, P=100)
    with pytest.raises(Hopeless, match=r"^1000 groups in a row"):
        run_filtered(["too_hard"] * 1001, P=100)
    assert scheduler_of().left_out == ""


def test_every_group_that_comes_to_nothing_is_to_be_replaced_by_one_of_its_environment():
    empty, full = ["zero_advantage"] * 2, ["zero_advantage", ""]
    _, replaced = run_filtered(["too_easy", full, empty, "too_easy", full, full, empty, empty, full])
    assert [example.index for example in replaced] == [0, 3, 6, 7]
    assert [example.env for example in replaced] == ["a", "b", "a", "b"]


def test_spares_are_in_flight_beside_what_the_batch_needs_and_go_into_the_next_one():
    scheduler, source = scheduler_of(P=4, G=1, k=1, oversampling_factor=1.5), examples()
    first = dispatch_all(scheduler, source)
    assert len(first) == 4 * 2 + 2
    finish_all(scheduler, first[4:])
    assert [group[0].example.index for group in scheduler.take_batch()] == [4, 5, 6, 7]
    assert scheduler.take_batch() is None
    more = dispatch_all(scheduler, source)
    assert len(more) == 10 - 6 - 4, "weights 1 are not there, so there is room for one batch and the spares"
    finish_all(scheduler, first[:2])
    scheduler.set_version(1)
    assert [group[0].example.index for group in scheduler.take_batch()] == [0, 1, 8, 9]


def test_spares_of_synchronous_training_are_cancelled_when_its_weights_come():
    ended = []
    scheduler, source = scheduler_of(P=2, G=1, k=0, oversampling_factor=2, ended=ended), examples()
    first = dispatch_all(scheduler, source)
    assert len(first) == 4
    finish_all(scheduler, first[1:])
    assert [group[0].example.index for group in scheduler.take_batch()] == [1, 2]
    assert dispatch_all(scheduler, source) == []
    scheduler.set_version(1)
    assert [(one.dispatch.example.index, str(one.end)) for one in ended[2:]] == [
        (0, "cancelled (stale)"), (3, "cancelled (stale)")
    ]  # fmt: skip
    assert [one.example.index for one in dispatch_all(scheduler, source)] == [0, 3, 4, 5]


def test_a_strict_level_takes_no_newer_weights_than_the_batch_is_to_be_made_by():
    scheduler, source = scheduler_of(P=1, G=1, k=1, is_strict=True), examples()
    assert scheduler.newest_allowed == 0
    finish_all(scheduler, dispatch_all(scheduler, source))
    for batch in range(2):
        assert [group[0].version for group in scheduler.take_batch()] == [0], batch
    assert scheduler.newest_allowed == 1
    assert scheduler.waits_for_weights
    scheduler.set_version(1)
    assert scheduler.newest_allowed == 1
    with pytest.raises(AssertionError, match="weights 2 after 1"):
        scheduler.set_version(2)
    (dispatch,) = dispatch_all(scheduler, source)
    finish_all(scheduler, [dispatch])
    assert [group[0].version for group in scheduler.take_batch()] == [1]
    assert scheduler_of(k=1).newest_allowed is None


def test_a_batch_of_tokens_takes_whole_groups_until_it_has_as_many():
    scheduler, source = scheduler_of(P=100, G=1, k=0, first_estimate=50.0), examples()
    first = dispatch_all(scheduler, source)
    assert len(first) == 2, "as many as it takes if each has the estimated size"
    finish_all(scheduler, first, size=30)
    more = dispatch_all(scheduler, source)
    assert len(more) == 2, "60 tokens are there, and groups have 30"
    finish_all(scheduler, more[:1], size=30)
    assert scheduler.take_batch() is None
    finish_all(scheduler, more[1:], size=30)
    assert [group[0].example.index for group in scheduler.take_batch()] == [0, 1, 2, 3]
    assert scheduler.active_size == 0


def test_a_group_of_which_no_token_is_trained_on_fills_no_batch_and_is_replaced_at_once():
    ended = []
    scheduler, source = scheduler_of(P=100, G=1, k=0, first_estimate=50.0, ended=ended), examples()
    first = dispatch_all(scheduler, source)
    finish_all(scheduler, first[:1], size=0, filtered=["too_long"])
    assert [str(one.end) for one in ended] == ["filtered (too_long)"]
    assert ended[0].scored is first[0]
    assert scheduler.left_out.startswith("1 group had nothing to train on: of the rollouts, 1 as too_long")
    assert [one.example.index for one in dispatch_all(scheduler, source)] == [2], "two of 50 tokens are still to come"
    finish_all(scheduler, first[1:], size=100)
    assert [group[0].example.index for group in scheduler.take_batch()] == [1]
    assert scheduler.left_out == ""
    assert scheduler.counters.groups_filtered == 1


def test_groups_of_a_blocked_environment_wait_and_hold_nobody_up():
    scheduler, source = scheduler_of(P=4, G=2, k=0), examples(envs=("a", "b"))
    assert scheduler.has_work(["a", "b"])
    of_b = dispatch_all(scheduler, source, blocked={"a"})
    assert [(one.example.env, one.example.index) for one in of_b] == [("b", 1), ("b", 1), ("b", 3), ("b", 3)]
    assert not scheduler.has_work(["a"])
    assert scheduler.has_work()
    assert [one.example.index for one in dispatch_all(scheduler, source)] == [0, 0, 2, 2]


def test_a_group_is_started_for_the_batch_that_it_fills():
    scheduler, source = scheduler_of(P=2, G=1, k=2, max_batches=3, oversampling_factor=1.5), examples()
    assert [one.batch for one in dispatch_all(scheduler, source)] == [0, 0, 1, 1, 2, 2, 2]


def test_interrupted_rollouts_are_dispatched_again_in_their_groups():
    ended = []
    scheduler, source = scheduler_of(P=1, G=3, k=0, ended=ended), examples()
    first = dispatch_all(scheduler, source)
    scheduler.succeed(first[1].rollout_id, "done")
    scheduler.interrupt("evaluation")
    assert [(one.dispatch, str(one.end)) for one in ended] == [
        (first[0], "cancelled (evaluation)"), (first[2], "cancelled (evaluation)")
    ]  # fmt: skip
    again = dispatch_all(scheduler, source)
    assert [(one.place, one.attempt, one.example.index) for one in again] == [(0, 1, 0), (2, 1, 0)]


def test_what_is_active_when_the_run_is_over_is_cancelled_and_the_sum_is_told():
    ended = []
    scheduler, source = scheduler_of(P=1, G=2, k=1, max_batches=2, ended=ended), examples()
    dispatches = dispatch_all(scheduler, source)
    finish_all(scheduler, dispatches[:3])
    scheduler.take_batch()
    scheduler.close()
    scheduler.close()
    assert [str(one.end) for one in ended] == ["used", "used", "cancelled (run_over)", "cancelled (run_over)"]
    assert str(scheduler.counters) == "4 rollouts: 2 used, 2 cancelled (run_over)"
    assert scheduler.num_in_flight == scheduler.num_held == scheduler.num_active_groups == 0


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


def test_an_event_costs_the_same_however_many_rollouts_are_in_flight():
    """Comparisons of dictionaries and heaps are not counted, but looks at groups are: those that a scan would take."""
    looks = []
    for num_groups in (16, 4096):
        scheduler, source = scheduler_of(P=num_groups, G=1, k=0), examples()
        dispatches = dispatch_all(scheduler, source)
        groups = scheduler._groups = CountingDict(scheduler._groups)
        scheduler.fail(dispatches[0].rollout_id, None, "timeout")
        finish_all(scheduler, dispatches[1:2])
        assert scheduler.next_dispatch(source) is not None
        assert scheduler.take_batch() is None
        looks.append(groups.num_looks)
    assert looks[0] == looks[1] < 30


class CountingDict(dict):
    num_looks = 0

    def __getitem__(self, key):
        self.num_looks += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.num_looks += 1
        return super().get(key, default)

    def __contains__(self, key):
        self.num_looks += 1
        return super().__contains__(key)

    def __iter__(self):
        self.num_looks += len(self)
        return super().__iter__()

    def items(self):
        self.num_looks += len(self)
        return super().items()


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


def restored(scheduler, version=None, **limits):
    """A scheduler that goes on from where this one is."""
    ended = []
    other = scheduler_of(**{"P": scheduler.limits.batch_target, "G": scheduler.limits.rollouts_per_group} | limits)
    other._on_end = ended.append
    other.restore(scheduler.snapshot(), version=version)
    return other, ended


def test_a_restored_scheduler_goes_on_as_the_other_one_would():
    scheduler, source = scheduler_of(P=2, G=2, k=2), examples()
    dispatches = dispatch_all(scheduler, source)
    finish_all(scheduler, dispatches[:6])
    assert scheduler.take_batch() is not None
    scheduler.set_version(1)
    scheduler.fail(dispatches[7].rollout_id, None, "timeout")
    other, ended = restored(scheduler, k=2)
    assert other.snapshot() == scheduler.snapshot()
    other.interrupt("restarted")
    assert sorted(one.dispatch.rollout_id for one in ended) == [6, 8, 9, 10, 11]
    assert {str(one.end) for one in ended} == {"cancelled (restarted)"}
    again = dispatch_all(other, examples())
    assert [one.rollout_id for one in again[:6]] == list(range(12, 18)), "ids are never given twice"
    assert {(one.group, one.place, one.attempt) for one in again[:6]} == {
        (3, 0, 1), (3, 1, 2), (4, 0, 1), (4, 1, 1), (5, 0, 1), (5, 1, 1)
    }  # fmt: skip
    assert [one.group for one in again[6:]] == [6, 6, 7, 7], "what there was room for"
    counters = other.counters
    assert counters.dispatched == counters.ends.total() + other.num_in_flight + other.num_held


def test_what_was_held_is_shipped_by_the_restored_one_and_a_snapshot_stays_as_it_was():
    scheduler, source = scheduler_of(P=2, G=2, k=1), examples()
    finish_all(scheduler, dispatch_all(scheduler, source)[:4])
    state = scheduler.snapshot()
    batch = scheduler.take_batch()
    finish_all(scheduler, dispatch_all(scheduler, source))
    for _ in range(2):
        other = scheduler_of(P=2, G=2, k=1)
        other.restore(state)
        assert other.take_batch() == batch
        assert other.take_batch() is None


def test_groups_that_were_complete_and_not_judged_are_told():
    scheduler = scheduler_of(P=2, G=2, k=0)
    dispatches = dispatch_all(scheduler, examples())
    for dispatch in dispatches[:3]:
        scheduler.succeed(dispatch.rollout_id, dispatch.place)
    other, _ = restored(scheduler, k=0)
    (group,) = other.unjudged()
    assert (group.number, group.results, group.first_version, group.example) == (0, [0, 1], 0, dispatches[0].example)
    other.accept(0, [None, None])
    assert other.unjudged() == []


def test_a_group_of_a_scorer_of_groups_that_is_there_in_part_starts_anew():
    scheduler = scheduler_of(P=1, G=3, k=0)
    dispatches = dispatch_all(scheduler, examples())
    scheduler.succeed(dispatches[0].rollout_id, "scored")
    other, ended = restored(scheduler, k=0)
    other.interrupt("restarted", {"e"})
    assert len(ended) == 3
    assert [one.place for one in dispatch_all(other, examples())] == [0, 1, 2]


def test_tokens_of_older_weights_than_a_group_began_with_count_in_its_age():
    scheduler, source = scheduler_of(P=1, G=2, k=1, m=0), examples()
    finish_all(scheduler, dispatch_all(scheduler, source))
    scheduler.take_batch()
    scheduler.set_version(1)
    dispatches = dispatch_all(scheduler, source)
    scheduler.succeed(dispatches[0].rollout_id, None)
    for version, is_stale in ((0, True), (1, False)):
        other, _ = restored(scheduler, version=version, k=1, m=0)
        other.interrupt("restarted")
        assert other.version == version
        assert dispatch_all(other, source)[0].version == version
        other.set_version(1)
        assert (other.counters.groups_stale > scheduler.counters.groups_stale) == is_stale
