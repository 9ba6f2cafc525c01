import asyncio
from functools import partial

import pytest

from prime_rl.aio import Supervisor
from prime_rl.orchestrator.concurrency import Concurrency
from prime_rl.orchestrator.dispatch import Dispatcher, Job


class OneServer:
    """In the place of a fleet."""

    def __init__(self):
        self.version = 0
        self.assigned = {}

    def may_assign(self, version):
        return self.version >= version

    def assign(self, key, group, version):
        assert key not in self.assigned
        self.assigned[key] = group
        return ("server",)

    def release(self, key):
        del self.assigned[key]


class Jobs:
    """As many jobs as there are numbers in `lengths`, each taking so long; the clock's next opening in `delay_s`."""

    def __init__(self, name, lengths):
        self.name = name
        self.lengths = lengths
        self.ended = []
        self.opens_at = 0.0

    def wants(self, now):
        return bool(self.lengths) and now >= self.opens_at

    def next(self, now):
        number = len(self.lengths)
        return Job(key=(self.name, number), group=0, version=0, run=partial(self.run, number, self.lengths.pop()))

    def delay(self, now):
        return max(0.0, self.opens_at - now) if self.opens_at > now else None

    async def run(self, number, length, servers):
        assert servers == ("server",)
        await asyncio.sleep(length)
        self.ended.append(number)


async def run_until(dispatcher, supervisor, condition):
    supervisor.start("dispatcher", dispatcher.run(), endless=True)

    async def wait():
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - a condition of another's state
                await asyncio.sleep(0.005)

    await supervisor.run("test", wait())


def dispatcher_of(fleet, supervisor, bound, **sources):
    concurrency = Concurrency(bound, {name: 1 / len(sources) for name in sources}, usual=10)
    return Dispatcher(fleet, supervisor, concurrency, sources, version=lambda: 0)


async def test_both_sources_come_to_their_ends_within_the_bound_and_leave_nothing_behind():
    fleet, supervisor = OneServer(), Supervisor()
    one, two = Jobs("one", [0.01] * 20), Jobs("two", [0.01] * 20)
    dispatcher = dispatcher_of(fleet, supervisor, 4, one=one, two=two)
    most = 0

    def is_over():
        nonlocal most
        most = max(most, len(fleet.assigned))
        assert dispatcher.concurrency.in_flight.total() == len(fleet.assigned)
        return len(one.ended) == len(two.ended) == 20 and not fleet.assigned

    await run_until(dispatcher, supervisor, is_over)
    assert most == 4


async def test_a_job_that_is_cancelled_gives_its_room_back_even_before_it_ran():
    fleet, supervisor = OneServer(), Supervisor()
    jobs = Jobs("one", [3600.0, 3600.0, 0.0])
    dispatcher = dispatcher_of(fleet, supervisor, 1, one=jobs)
    dispatcher.cancel(("one", 3))  # of which nothing is known yet

    def cancel_and_look():
        for number in (1, 2):
            dispatcher.cancel(("one", number))
        return not jobs.lengths and not fleet.assigned

    await run_until(dispatcher, supervisor, cancel_and_look)
    assert jobs.ended == [3]


async def test_what_a_rate_limit_holds_back_starts_when_it_is_time_though_nothing_happens():
    fleet, supervisor = OneServer(), Supervisor()
    jobs = Jobs("one", [0.0])
    began = asyncio.get_running_loop().time()
    jobs.opens_at = began + 0.2
    await run_until(dispatcher_of(fleet, supervisor, 1, one=jobs), supervisor, lambda: jobs.ended)
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_nothing_starts_while_no_server_has_the_weights():
    fleet, supervisor = OneServer(), Supervisor()
    fleet.version = -1
    jobs = Jobs("one", [0.0])
    dispatcher = dispatcher_of(fleet, supervisor, 1, one=jobs)
    looks = 0

    def comes_up_later():
        nonlocal looks
        looks += 1
        if looks < 10:
            assert not fleet.assigned
        else:
            fleet.version = 0
            dispatcher.wake()
        return bool(jobs.ended)

    await run_until(dispatcher, supervisor, comes_up_later)


async def test_a_job_that_raises_ends_everything_and_is_named():
    fleet, supervisor = OneServer(), Supervisor()
    jobs = Jobs("one", [-1.0])

    async def fail(number, length, servers):
        raise KeyError(number)

    jobs.run = fail
    with pytest.raises(KeyError) as error:
        await run_until(dispatcher_of(fleet, supervisor, 1, one=jobs), supervisor, lambda: False)
    assert error.value.__notes__ == ["raised in task \"rollout ('one', 1)\""]
