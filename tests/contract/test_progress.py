"""A server says for others to read whether its engine gets on."""

import asyncio
from collections.abc import Callable, Iterator

import psutil
import pytest

from prime_rl.activity.files import Report, read_reports
from tests.contract.conftest import Api, http_client
from tests.contract.servers import Server, start


def report_of(server: Server) -> Report:
    return read_reports(server.log.parent / "outputs" / "activity")["inference"]


async def until(server: Server, condition: Callable[[Report], bool]) -> Report:
    """The first report of which `condition` holds; there is a new one every second."""
    async with asyncio.timeout(60):
        while not condition(report := report_of(server)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return report


@pytest.fixture
def without_statistics(kind, model, tmp_path) -> Iterator[Server]:
    if kind.name != "vllm":
        pytest.skip("there are none that could be switched off")
    running = start(kind, model, tmp_path, vllm={"disable_log_stats": True})
    try:
        yield running.await_health()
    finally:
        running.stop()


async def assert_it_tells(server: Server, api: Api) -> None:
    """That its engine gets on, and no longer once it is stopped with a request in it.

    It can be where it is a process of its own; one that is a thread of the server cannot be stopped alone.
    """
    engines = psutil.Process(server.process.pid).children(recursive=True)
    assert bool(engines) == (server.kind.name == "vllm")
    await api.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
    await until(server, lambda one: one.got_on_s is not None and max(one.engine_s, one.got_on_s) < 3.0)
    for engine in engines:
        engine.suspend()
    try:
        asked = asyncio.create_task(api.generate([1, 2, 3], max_tokens=50, ignore_eos=True))
        if engines:
            stuck = await until(server, lambda one: min(one.engine_s, one.got_on_s) > 4.0)
            assert stuck.loop_s < 3.0, "the server itself answers"
    finally:
        for engine in engines:
            engine.resume()
    await asked
    await until(server, lambda one: max(one.engine_s, one.got_on_s) < 3.0)


async def test_a_server_without_a_request_gets_on(api, server):
    await api.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    await asyncio.sleep(5.0)
    idle = report_of(server)
    assert max(idle.loop_s, idle.engine_s, idle.got_on_s) < 3.0


async def test_an_engine_that_takes_no_step_with_a_request_in_it_is_told(api, server):
    await assert_it_tells(server, api)


async def test_it_is_told_also_where_the_backend_counts_nothing_for_others(without_statistics):
    async with http_client(without_statistics) as http:
        await assert_it_tells(without_statistics, Api(http, without_statistics))
