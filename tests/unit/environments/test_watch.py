import asyncio
import contextlib
import inspect
import textwrap
import time

import psutil
import pytest

from prime_rl.environments import watch as watch_module
from prime_rl.environments.watch import Overran, Watch, deadline, limit_cpu, memory_of, within


@pytest.fixture
async def watch():
    watch = Watch()
    watch.start()
    yield watch
    watch.stop()


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_code_that_holds_the_loop_after_its_deadline_is_interrupted_where_it_is(watch):
    started = time.monotonic()
    with deadline(0.2) as current, pytest.raises(Overran):
        spin(60)
    assert current.was_cut
    assert time.monotonic() - started < 10
    await asyncio.sleep(0.2)
    lag_s = watch.take_lag()
    assert lag_s > 0.2
    assert watch.take_lag() < lag_s, "since the last time"


async def test_functions_of_asyncio_are_not_interrupted_but_the_code_that_called_them(watch):
    of_asyncio = {"__name__": "asyncio.base_events", "monotonic": time.monotonic}
    exec(textwrap.dedent(inspect.getsource(spin)).replace("time.monotonic", "monotonic"), of_asyncio)
    with deadline(0.1) as current:
        of_asyncio["spin"](1.5)
        assert not current.was_cut
        with pytest.raises(Overran):
            spin(60)


async def test_code_within_its_deadline_or_without_one_may_hold_the_loop(watch):
    spin(1.0)
    with deadline(None), deadline(60) as current:
        spin(1.0)
    assert not current.was_cut


async def test_code_that_gives_the_loop_back_is_not_interrupted(watch, monkeypatch):
    monkeypatch.setattr(watch_module, "STANDSTILL_S", 10.0)  # a busy machine is no matter of this test
    with deadline(0.1) as current:
        for _ in range(20):
            await asyncio.sleep(0.02)
            spin(0.02)
    assert not current.was_cut


async def test_only_the_code_whose_deadline_passed_is_interrupted(watch):
    async def innocent():
        await asyncio.sleep(0.1)
        spin(1.0)
        return "done"

    async def guilty():
        with deadline(0.3):
            await asyncio.sleep(0.05)
            spin(60)

    done, error = await asyncio.gather(innocent(), guilty(), return_exceptions=True)
    assert done == "done"
    assert isinstance(error, Overran)


async def test_an_earlier_deadline_stays_in_force_and_a_past_one_holds_for_nothing(watch):
    with deadline(0.1) as outer, pytest.raises(Overran), deadline(60):
        spin(60)
    assert outer.was_cut
    with deadline(0.1):
        later = asyncio.create_task(asyncio.to_thread(time.sleep, 0))
        left_behind = asyncio.create_task(held_later())
    await later
    assert await left_behind == "not interrupted"


async def held_later():
    await asyncio.sleep(0.3)
    spin(1.0)
    return "not interrupted"


async def test_a_deadline_is_known_to_have_passed_even_where_the_exception_is_caught(watch):
    with deadline(0.1) as current, contextlib.suppress(BaseException):  # as careless code does
        spin(60)
    assert current.was_cut


async def test_the_time_for_which_others_held_the_loop_is_given_back(watch):
    async def beside():
        async with within(2.0):
            await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
        return "done"

    async def after():
        with pytest.raises(TimeoutError):
            async with within(2.0):
                await asyncio.sleep(60)
        return time.monotonic() - started

    async def holds():
        await asyncio.sleep(0.05)
        spin(3.0)

    started = time.monotonic()
    done, seconds, _ = await asyncio.gather(beside(), after(), holds())
    assert done == "done"
    assert 4.5 < seconds < 20
    assert watch.stood_s > 2.5


async def test_who_held_the_loop_is_given_nothing_back(watch):
    async with within(60) as whole, within(None):
        at = whole.at
        spin(2.5)
        await asyncio.sleep(0.2)
        assert whole.at - at < 1.0


async def test_code_that_waits_is_ended_at_its_deadline_and_at_an_earlier_one_around_it(watch):
    with pytest.raises(TimeoutError):
        async with within(0.1) as outer, within(60) as inner:
            await asyncio.sleep(60)
    assert inner is outer
    assert outer.has_expired
    assert not outer.was_cut
    with pytest.raises(TimeoutError, match="its own"):
        async with within(60) as current:
            raise TimeoutError("its own")
    assert not current.has_expired


def test_memory_counts_child_processes():
    own = psutil.Process()
    assert memory_of(own) >= own.memory_info().rss * 0.9


def test_without_limits_nothing_is_changed():
    before = psutil.Process().nice()
    limit_cpu(num_cpus=None, first_cpu=0, niceness=0)
    assert psutil.Process().nice() == before
