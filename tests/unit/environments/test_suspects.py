import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from tests.unit.environments.scripted import request_of, spec_of

from prime_rl.environments import pool as pools
from prime_rl.environments.rollouts import Rollout, RolloutRequest, WorkerReady
from prime_rl.environments.suspects import Running, Suspects, example_of


def of(example, split="train"):
    return RolloutRequest(id=1, example=example, sampling={}, version=0, timeout_s=1, split=split)


def running(*examples, seconds=1.0, split="train"):
    return [Running(of(example, split), seconds) for example in examples]


class Environment:
    """Suspects, and the time in which workers die."""

    def __init__(self):
        self.suspects = Suspects()
        self.now = 0.0

    def dies(self, *examples, worker="w", later=60.0, seconds=1.0):
        """A worker with one rollout of each of these dies so much later than the one before. Whether each is blamed."""
        self.now += later
        return self.suspects.died_with(worker, running(*examples, seconds=seconds), self.now)

    def fill(self, examples, *, workers, seconds=0.0):
        """Give each of these to the first worker that may have it; what each has then."""
        filled = [[] for _ in range(workers)]
        for example in examples:
            for there in filled:
                if self.suspects.may_join(of(example), running(*there, seconds=seconds)):
                    there.append(example)
                    break
        return filled


@pytest.fixture
def env():
    return Environment()


def test_a_rollout_that_was_alone_in_its_worker_is_to_blame(env):
    assert env.dies(3) == [True]


def test_of_several_none_is_blamed_at_first_and_then_the_one_that_was_there_each_time(env):
    assert env.dies(1, 2, 3) == [False] * 3
    assert env.dies(4, 2, 5) == [False, True, False]
    assert env.dies(2, 6) == [True, False]


def test_rollouts_of_one_example_are_one_suspect(env):
    assert env.dies(1, 1) == [False, False]
    assert env.dies(1, 1, 2) == [True, True, False]
    both = [*running(1), *running(1, split="eval")]
    assert env.suspects.died_with("w", both, 1e3) == [True, False], "a number is of its split"


def test_of_those_that_were_together_in_two_deaths_a_worker_has_few_at_a_time_and_after_three_a_single_one(env):
    examples = range(40)
    for expected in (40, 8, 1):
        assert env.dies(*examples) == [False] * 40
        full = env.fill(examples, workers=3)
        assert [len(there) for there in full] == ([40, 0, 0] if expected == 40 else [expected] * 3)
        assert env.suspects.may_join(of(full[0][0]), running(*full[0])), "another rollout of an example that runs there"
        assert env.suspects.may_join(of(99), running(*full[0])), "one that is not suspected"
        assert env.suspects.may_join(of(39), running(*full[0][1:])), "one has left"
        assert [env.suspects.is_suspect(of(example)) for example in (0, 99)] == [expected < 40, False]


def test_deaths_of_several_workers_at_almost_the_same_time_suspect_nobody_who_was_not_in_all_of_them(env):
    """The machine did it, three times over, to 4 workers of 16 rollouts each."""
    workers = [range(first, first + 16) for first in range(0, 64, 16)]
    for _ in range(3):
        env.now += 300
        for number, examples in enumerate(workers):
            assert env.dies(*examples, worker=number, later=0.5) == [False] * 16
    assert [len(there) for there in env.fill(range(64), workers=4)] == [64, 0, 0, 0]


def test_one_that_ends_several_workers_at_almost_the_same_time_is_found_all_the_same(env):
    """Each rollout of its group is in another worker."""
    blamed = [env.dies(0, *range(8 * n + 1, 8 * n + 9), worker=n, later=0.2) for n in (1, 2, 3)]
    blamed.append(env.dies(0, *range(8), worker=4, later=60.0))
    assert blamed == [*[[False] * 9] * 3, [True, True, *[False] * 7]], "two rollouts of it were in the last"


def test_a_worker_that_dies_again_at_once_is_another_event(env):
    assert env.dies(0, 1) == [False, False]
    assert env.dies(0, 2, later=0.5) == [True, False]


def test_what_ended_well_between_deaths_at_the_same_time_is_not_taken_into_account_twice(env):
    env.dies(0, 1, worker="a")
    env.suspects.ended(of(0))
    assert env.dies(1, 2, worker="b", later=0.5) == [False, False]
    assert env.dies(0, worker="c", later=0.5) == [False], "of an event that it had no part in"
    assert env.dies(1, 0) == env.dies(2, 0, worker="d", later=0.1) == [False, False], (
        "none was in several deaths in a row"
    )
    assert env.dies(0, 3) == [True, False]


def test_one_that_runs_for_much_longer_than_when_its_worker_ended_is_no_suspect_any_more(env):
    for _ in range(3):
        env.dies(1, 2, seconds=100.0)
    assert not env.suspects.may_join(of(1), running(2, seconds=200.0))
    assert env.suspects.may_join(of(1), running(2, seconds=206.0))
    env.now += 1000
    late = [*running(2, seconds=206.0), *running(1, seconds=10.0)]
    assert env.suspects.died_with("w", late, env.now) == [False, True], "the other was there four times in a row"


def test_one_that_ends_its_worker_at_once_is_found_before_the_pool_is_given_up(env):
    """All are begun again at the same time, and in the order that is worst: the poison last."""
    todo, deaths, blamed = set(range(64)), 0, []
    while blamed[-3:] != [0, 0, 0]:
        (there,) = env.fill(sorted(todo, reverse=True), workers=1)
        if 0 in there:
            deaths += 1
            blamed += [one for one, is_guilty in zip(there, env.dies(*there, later=1.0), strict=True) if is_guilty]
        else:
            deaths = 0
            for example in there:
                env.suspects.ended(of(example))
                todo.discard(example)
        assert deaths <= 5
    assert blamed == [0, 0, 0]


def test_one_that_ended_well_in_between_is_no_suspect_any_more(env):
    for _ in range(2):
        env.dies(1, 2)
        env.suspects.ended(of(1))
    assert env.dies(1, 2) == [False, True]


def test_a_worker_without_rollouts_ends_to_nobodys_blame(env):
    assert env.dies() == []
    assert env.dies(1, worker="other", later=0.1) == [False], "both ended at the same time"


def test_one_that_always_ends_its_worker_is_blamed_before_long_and_others_seldom(env):
    draw = random.Random(4)
    blamed = {"poison": 0, "other": 0}
    for _ in range(200):  # deaths, each with the poison in it, and others that mostly end well in between
        there = [0, *draw.sample(range(1, 40), 15)]
        for example, is_blamed in zip(there, env.dies(*there), strict=True):
            blamed["poison" if example == 0 else "other"] += is_blamed
        for example in range(1, 40):
            if draw.random() < 0.5:
                env.suspects.ended(of(example))
    assert blamed["poison"] >= 198
    assert blamed["other"] <= 6


def test_what_is_counted_of_an_example_is_what_its_requests_have_in_common():
    assert example_of(of(3, "eval")) == ("eval", 3)


class MadeUpPlace:
    """A worker that is always live; the test says when its rollouts end."""

    is_live, is_retiring, num_restarts, lag_s = True, False, 0, 0.0
    seconds = 0.0
    """For which its rollouts run."""

    def __init__(self, spec, limits, log, suspects, **_):
        self.ready = WorkerReady(num_train=1, num_eval=0, scores_groups=False, has_eval_split=False)
        self.served = asyncio.get_running_loop().create_future()
        self.suspects, self.held = suspects, {}

    @property
    def load(self):
        return len(self.held)

    def running(self):
        return [Running(request, self.seconds) for request, _ in self.held.values()]

    async def run(self, request, *, wire_id):
        self.held[wire_id] = request, asyncio.get_running_loop().create_future()
        try:
            return await self.held[wire_id][1]
        finally:
            del self.held[wire_id]

    def end(self):
        for request, ended in self.held.values():
            self.suspects.ended(request)
            ended.set_result(Rollout(id=request.id, env="scripted", example=request.example))

    def avoid(self, servers):
        pass

    async def wait_ready(self):
        return self.ready

    async def close(self):
        pass


@asynccontextmanager
async def made_up_pool(monkeypatch, num_workers):
    monkeypatch.setattr(pools, "Place", MadeUpPlace)
    async with pools.open_pools([spec_of()], num_workers=num_workers, log_dir=None) as opened:
        pool = opened["scripted"]
        pool._grow(num_workers - 1)
        yield pool, list(pool._places.values())


async def begun(pool, examples):
    """Tasks that run rollouts of these, each in a worker or waiting for one."""
    tasks = [asyncio.create_task(pool.run(request_of(example))) for example in examples]
    await settled()
    return tasks


async def settled():
    for _ in range(500):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("deaths", "most"), [(1, 16), (2, 8), (3, 1)])
async def test_suspects_are_spread_over_all_workers_and_those_of_an_example_are_together(monkeypatch, deaths, most):
    async with made_up_pool(monkeypatch, 4) as (pool, places):
        for minute in range(deaths):
            pool._suspects.died_with("one that is gone", running(*range(64)), 60.0 * minute)
        tasks = await begun(pool, [*range(64)] * 2)
        if deaths == 1:
            assert [place.load for place in places] == [32] * 4, "nobody is suspected"
        else:
            there = [Counter(request.example for request, _ in place.running()) for place in places]
            assert [len(each) for each in there] == [most] * 4
            assert len(set().union(*there)) == 4 * most, "no example is in two workers"
            assert pool.load.in_flight + pool.load.waiting == 128
        while not all(task.done() for task in tasks):
            for place in places:
                place.end()
            await settled()
        assert pool.load.waiting == 0


async def test_a_rollout_that_ends_has_few_others_look_whether_they_may_begin(monkeypatch):
    looked, may_join = [], Suspects.may_join
    monkeypatch.setattr(Suspects, "may_join", lambda *args: looked.append(args) or may_join(*args))
    async with made_up_pool(monkeypatch, 2) as (pool, places):
        for minute in range(3):
            pool._suspects.died_with("one that is gone", running(*range(400)), 60.0 * minute)
        tasks = await begun(pool, range(400))
        assert pool.load.waiting == 398
        while not all(task.done() for task in tasks):
            for place in places:
                place.end()
            await settled()
        assert len(looked) <= 400 * 8


async def test_suspects_go_on_once_those_that_run_have_outlived_what_ended_their_worker(monkeypatch):
    monkeypatch.setattr(pools, "TEND_INTERVAL_S", 0.05)
    async with made_up_pool(monkeypatch, 1) as (pool, places):
        for minute in range(3):
            pool._suspects.died_with("one that is gone", running(0, 1, 2), 60.0 * minute)
        tasks = await begun(pool, range(3))
        assert [places[0].load, pool.load.waiting] == [1, 2]
        places[0].seconds = 100.0
        async with asyncio.timeout(5):
            while pool.load.waiting:  # noqa: ASYNC110 - the pool looks now and then
                await asyncio.sleep(0.01)
        places[0].end()
        await asyncio.gather(*tasks)
