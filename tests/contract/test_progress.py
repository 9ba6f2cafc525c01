"""A server says for others to read whether its engine gets on."""

import asyncio
from collections.abc import Awaitable, Callable

import psutil
import pytest

from prime_rl.activity.files import Report, read_reports


@pytest.fixture
def until(server) -> Callable[[Callable[[Report], bool]], Awaitable[Report]]:
    """Waits for a report of which something holds; there is a new one every second."""

    async def wait(condition: Callable[[Report], bool]) -> Report:
        async with asyncio.timeout(60):
            while not condition(report := read_reports(server.log.parent / "outputs" / "activity")["inference"]):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return report

    return wait


async def test_a_server_gets_on_while_it_makes_tokens_and_without_a_request_it_is_well_though_it_does_not(api, until):
    await api.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    idle = await until(lambda one: one.got_on_s is not None and one.got_on_s > 3.0)
    assert idle.loop_s < idle.got_on_s
    await api.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
    await until(lambda one: one.got_on_s < 3.0)


async def test_an_engine_that_takes_no_step_with_a_request_in_it_is_told(kind, api, server, until):
    """Where it is a process of its own. One that is a thread of the server cannot be stopped alone."""
    engines = psutil.Process(server.process.pid).children(recursive=True)
    assert bool(engines) == (kind.name == "vllm")
    for engine in engines:
        engine.suspend()
    try:
        asked = asyncio.create_task(api.generate([1, 2, 3], max_tokens=50, ignore_eos=True))
        if engines:
            await until(lambda one: one.loop_s > 4.0)
    finally:
        for engine in engines:
            engine.resume()
    await asked
    await until(lambda one: one.loop_s < 3.0)
