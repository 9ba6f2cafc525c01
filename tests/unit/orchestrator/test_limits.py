"""The limits hold: scheduler and buffer in random timings of everything around them.

The rules are those of docs/architecture.md: the staleness bound, exact ratios, and that every rollout ends once.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config.algorithms import BufferConfig
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.groups import Dispatch
from prime_rl.orchestrator.limits import SchedulerLimits
from prime_rl.orchestrator.scheduler import Scheduler

RATIOS = {"a": 3.0, "b": 1.0}
SCORED_AS_ONE = "b"
MAX_KILLS = 20
"""Of one run, or those that need long for a batch would have none at all."""


@dataclass
class Running:
    """A rollout in flight."""

    dispatch: Dispatch
    versions: list = field(default_factory=list)
    """Weights that sampled it."""
    is_generated: bool = False
    """It waits for its group to be scored as one."""
    scoring: int | None = None
    """Which scoring its answer comes from."""


class Simulation:
    """A server that samples with new weights before the scheduler knows of them, and may skip some; a trainer; workers
    that score the groups of environment b as one; scores; filters; failures before and after scoring; an evaluation
    that has everything to itself; answers of rollouts that were cancelled; and a process that is killed now and then,
    to go on from what it had written with its last batch, with the weights that are there by then, or older ones."""

    def __init__(self, seed, limits, failure_rate=0.1, filter_rate=0.1, is_evaluated=True, kill_rate=0.0):
        self.random = random.Random(seed)
        self.limits = limits
        self.start()
        self.kill_rate = kill_rate
        self.num_kills = 0
        self.failure_rate = failure_rate
        self.filter_rate = filter_rate
        self.blocked = set()
        self.running = {}
        self.judged = []
        self.ends = Counter()
        self.ended = set()
        self.shipped = []
        self.shipped_of = Counter()
        self.trained = 0
        self.served = 0
        self.num_scorings = 0
        self.is_evaluated = is_evaluated
        self.is_evaluated_alone = False
        self.gaps = []
        self.save()

    def start(self):
        self.buffer = Buffer({"a": 50, "b": 20}, BufferConfig(online_difficulty_filtering=True), ratios=RATIOS)
        self.scheduler = Scheduler(self.limits, self.end, self.buffer.replace)

    def save(self):
        """What is written with a batch, and what we know of the rollouts by then."""
        self.saved = self.scheduler.snapshot(), self.buffer.snapshot(), self.ends.copy(), self.ended.copy()

    def kill(self):
        self.num_kills += 1
        self.start()
        saved, buffer, ends, ended = self.saved
        self.ends, self.ended, self.is_evaluated_alone = ends.copy(), ended.copy(), False
        self.running = {one.rollout_id: Running(dispatch=one) for group in saved.groups for one in group.in_flight}
        self.buffer.restore(buffer)
        strict = len(self.shipped) - self.limits.max_async_level if self.limits.is_strict else self.trained
        newest = min(self.trained, max(0, strict))
        self.served = newest if self.random.random() < 0.8 else self.random.randint(0, newest)
        self.scheduler.restore(saved, version=self.served)
        self.scheduler.interrupt("restarted", {SCORED_AS_ONE})
        assert not self.running
        self.judged = self.scheduler.unjudged()
        if self.served > self.scheduler.version:
            self.scheduler.set_version(self.served)

    def end(self, one):
        assert one.dispatch.rollout_id not in self.ended, "every rollout ends once"
        self.ended.add(one.dispatch.rollout_id)
        self.ends[one.end.kind] += 1
        if one.result is None:
            del self.running[one.dispatch.rollout_id]

    def step(self):
        events = ["dispatch", "generate", "generate", "generate", "answer", "judge", "judge", "train", "load", "update",
                  "ship", "evaluate", "late"]  # fmt: skip
        if self.num_kills < MAX_KILLS and self.random.random() < self.kill_rate:
            self.kill()
        getattr(self, self.random.choice(events))()
        scheduler, counters = self.scheduler, self.scheduler.counters
        assert scheduler.num_in_flight == len(self.running)
        assert counters.dispatched == len(self.ended) + len(self.running) + scheduler.num_held
        assert counters.ends.total() == len(self.ended)

    def run(self, num_batches):
        for _ in range(100_000):
            if len(self.shipped) == num_batches:
                return
            self.step()
        raise AssertionError(f"{len(self.shipped)} batches of {num_batches}")

    def dispatch(self):
        if self.is_evaluated_alone:
            return
        if self.random.random() < 0.3:
            self.blocked ^= {self.random.choice("ab")}
        room = self.random.randint(1, 30)
        while room and (one := self.scheduler.next_dispatch(self.buffer.next, blocked=self.blocked)) is not None:
            assert one.example.env not in self.blocked
            assert one.version == self.scheduler.version
            self.running[one.rollout_id] = Running(dispatch=one, versions=[self.served])
            room -= 1

    def generate(self):
        """A rollout was generated, and scored, too, where it is scored alone."""
        running = self.one_of(one for one in self.running.values() if not one.is_generated)
        if running is None:
            return
        group = running.dispatch.group
        if self.random.random() < self.failure_rate:
            self.fail(running, is_whole=False)
        elif running.dispatch.example.env != SCORED_AS_ONE:
            self.succeed(running)
        else:
            running.is_generated = True
            together = [
                one for one in self.running.values()
                if one.dispatch.group == group and one.is_generated and one.scoring is None
            ]  # fmt: skip
            if len(together) == self.scheduler.limits.rollouts_per_group:
                self.num_scorings += 1
                for one in together:
                    one.scoring = self.num_scorings

    def answer(self):
        """A rollout of a group that was scored as one comes back."""
        running = self.one_of(one for one in self.running.values() if one.scoring is not None)
        if running is not None and self.random.random() < self.failure_rate:
            self.fail(running, is_whole=True)
        elif running is not None:
            self.succeed(running)

    def one_of(self, rollouts):
        rollouts = list(rollouts)
        return self.random.choice(rollouts) if rollouts else None

    def fail(self, running, is_whole):
        rollout_id = running.dispatch.rollout_id
        del self.running[rollout_id]
        self.scheduler.fail(rollout_id, running, "timeout", counts=self.random.random() < 0.8, is_whole=is_whole)

    def succeed(self, running):
        del self.running[running.dispatch.rollout_id]
        group = self.scheduler.succeed(running.dispatch.rollout_id, running)
        if group is not None:
            assert len({one.scoring for one in group.results}) == 1, "rollouts that were not scored together"
            assert [one.dispatch.place for one in group.results] == list(range(len(group.results)))
            self.judged.append(group)

    def judge(self):
        """Scores of a group are there, maybe when it was dropped already."""
        if not self.judged:
            return
        group = self.judged.pop(self.random.randrange(len(self.judged)))
        if not self.scheduler.is_active(group.number):
            self.scheduler.accept(group.number, group.results)
            self.scheduler.filter(group.number, "late")
            return
        reward = float(self.random.random() < 0.5) if self.random.random() < self.filter_rate else 0.5
        if why := self.buffer.judge(group.example, [reward] * len(group.results)):
            self.scheduler.filter(group.number, why)
        else:
            size = 1 if self.scheduler.limits.first_estimate == 1 else self.random.randint(1, 9)
            filtered = [self.random.choice(["", "", "", "gibberish"]) for _ in group.results]
            self.scheduler.accept(group.number, group.results, size=size, filtered=filtered)

    def train(self):
        self.trained = min(self.trained + 1, len(self.shipped))

    def load(self):
        """A server serves new weights, of which the scheduler is not told yet."""
        newest = self.trained
        if self.scheduler.newest_allowed is not None:
            newest = min(newest, self.scheduler.newest_allowed)
        if newest > self.served and not self.is_evaluated_alone:
            self.served = self.random.randint(self.served + 1, newest)
            for running in self.running.values():
                if not running.is_generated:
                    running.versions.append(self.served)

    def update(self):
        self.scheduler.set_version(self.served)

    def evaluate(self):
        """An evaluation begins, and everything else is put off, or it ends."""
        if self.is_evaluated_alone or (self.is_evaluated and self.random.random() < 0.2):
            self.is_evaluated_alone = not self.is_evaluated_alone
            if self.is_evaluated_alone:
                self.scheduler.interrupt("evaluation", {SCORED_AS_ONE})
                assert not self.running

    def late(self):
        """A rollout that was cancelled answers all the same."""
        if self.ended:
            rollout_id = self.random.randrange(self.scheduler.counters.dispatched)
            if rollout_id in self.ended:
                assert not self.scheduler.is_in_flight(rollout_id)
                assert self.scheduler.succeed(rollout_id, None) is None
                self.scheduler.fail(rollout_id, None, "late", is_whole=self.random.random() < 0.5)

    def ship(self):
        batch = self.scheduler.take_batch()
        if batch is not None:
            step = len(self.shipped)
            self.shipped.append(batch)
            self.shipped_of.update(group[0].dispatch.example.env for group in batch)
            self.gaps.append([step - version for group in batch for one in group for version in one.versions])
            self.save()

    def check(self):
        """What holds at the end of any run."""
        limits, scheduler = self.scheduler.limits, self.scheduler
        gaps = [gap for batch in self.gaps for gap in batch]
        k = limits.max_async_level
        bound = k if k == 0 or limits.is_strict else k + limits.max_off_policy_steps
        assert 0 <= min(gaps) <= max(gaps) <= bound
        if limits.is_strict:
            assert {gap for batch in self.gaps[k:] for gap in batch} <= {k}
        drawn = self.shipped_of + Counter(group.example.env for group in scheduler._groups.values())
        drawn += Counter(example.env for example in scheduler._again) + Counter(self.buffer._owed)
        for env, share in RATIOS.items():
            assert abs(drawn[env] - drawn.total() * share / 4) < 1, drawn
        scheduler.close()
        assert self.ends.total() == scheduler.counters.dispatched == len(self.ended)
        assert not self.running


@pytest.mark.parametrize("in_tokens", [False, True])
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("m", [0, 1, 8])
def test_over_ten_thousand_random_events_the_bound_and_the_ratios_hold_and_each_rollout_ends_once(
    k, m, is_strict, in_tokens
):
    limits = SchedulerLimits(
        batch_target=12 if in_tokens else 3,
        first_estimate=9.0 if in_tokens else 1.0,
        rollouts_per_group=2,
        max_async_level=k,
        max_off_policy_steps=m,
        max_attempts=2,
        oversampling_factor=random.Random(f"{k}{m}").choice([1.0, 1.4, 2.0]),
        is_strict=is_strict,
    )
    simulation = Simulation(f"{k}/{m}/{is_strict}/{in_tokens}", limits)
    for _ in range(10_000):
        simulation.step()
    assert len(simulation.shipped) > 20
    simulation.check()


def a_random_run(seed, kill_rate=0.0):
    """A run of a few batches whose limits and timings follow from the seed."""
    choose = random.Random(f"limits/{seed}")
    target, batches, in_tokens = choose.randint(1, 4), choose.randint(1, 5), choose.random() < 0.3
    limits = SchedulerLimits(
        batch_target=target * 7 if in_tokens else target,
        first_estimate=20.0 if in_tokens else 1.0,
        rollouts_per_group=choose.randint(1, 3),
        max_async_level=choose.randint(0, 3),
        max_off_policy_steps=choose.randint(0, 3),
        max_batches=batches,
        oversampling_factor=choose.choice([1.0, 1.3, 3.0]),
        is_strict=choose.random() < 0.3,
        max_attempts=choose.randint(1, 3),
    )
    simulation = Simulation(
        seed, limits, choose.choice([0.0, 0.1, 0.4]), choose.choice([0.0, 0.2, 0.6]),
        is_evaluated=choose.random() < 0.5, kill_rate=kill_rate,
    )  # fmt: skip
    simulation.run(batches)
    simulation.check()
    return simulation.num_kills


@settings(max_examples=100, deadline=None)
@given(seed=st.integers())
def test_every_run_comes_to_its_end_within_the_bound(seed):
    a_random_run(seed)


def test_runs_that_are_killed_and_go_on_again_and_again_come_to_their_end_within_the_bound():
    assert sum(a_random_run(seed, kill_rate=0.01) for seed in range(200)) > 200


@pytest.mark.slow
def test_in_ten_thousand_random_timings_runs_that_are_killed_and_go_on_come_to_their_end_within_the_bound():
    assert sum(a_random_run(seed, kill_rate=0.01) for seed in range(10_000)) > 10_000


@pytest.mark.slow
def test_in_ten_thousand_random_timings_every_run_comes_to_its_end_within_the_bound():
    for seed in range(10_000):
        a_random_run(seed)
