import asyncio
import time

import pytest

from prime_rl.monitors.lag import LoopLag


def block(seconds):
    time.sleep(seconds)


async def measured(interval_s, *blocks_s):
    lag = LoopLag(interval_s)
    watching = asyncio.create_task(lag.watch())
    for block_s in blocks_s:
        await asyncio.sleep(0.05)
        block(block_s)
    await asyncio.sleep(0.05)
    watching.cancel()
    return lag


async def test_code_that_holds_the_loop_is_seen_as_lag():
    lag = await measured(0.01, 0.2)
    found = lag.take()
    assert 0.15 <= found["event_loop_lag/max"] < 5
    assert 0 <= found["event_loop_lag/mean"] < found["event_loop_lag/max"]
    assert found["event_loop_lag/p90"] <= found["event_loop_lag/p99"] <= found["event_loop_lag/max"]


async def test_each_row_tells_of_the_time_since_the_last_one():
    lag = await measured(0.01, 0.2)
    lag.take()
    assert lag.take() == {}


def test_percentiles_are_values_that_were_measured():
    lag = LoopLag()
    lag._lags.extend(number / 100 for number in range(1, 101))
    assert lag.take() == {
        "event_loop_lag/mean": pytest.approx(0.505),
        "event_loop_lag/p90": 0.90,
        "event_loop_lag/p99": 0.99,
        "event_loop_lag/max": 1.0,
    }
