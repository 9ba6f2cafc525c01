"""Requests find a server that answers, over a transport that does as it is told."""

import asyncio

import httpx
import pytest

from prime_rl.environments.verifiers import failover
from prime_rl.environments.verifiers.failover import Failover, Route

A, B, C = (f"http://{name}:8000/v1" for name in "abc")


class Servers(httpx.AsyncBaseTransport):
    """What each host does with a request: a status, an exception, or "hang"."""

    def __init__(self, **does):
        self.does = does
        self.asked = []

    async def handle_async_request(self, request):
        self.asked.append(request.url.host)
        does = self.does[request.url.host]
        if isinstance(does, list):
            does = does.pop(0)
        if does == "hang":
            await asyncio.sleep(3600)
        if does == "half":
            return httpx.Response(200, stream=_Half())
        if isinstance(does, Exception):
            raise does
        self.last = request
        return httpx.Response(does, content=await request.aread())


class _Half(httpx.AsyncByteStream):
    async def __aiter__(self):
        yield b"half of"
        raise httpx.ReadError("connection reset")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(failover, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(failover, "LONGEST_PAUSE_S", 0.01)


async def send(servers, route, *, retry_s=0.0, avoid=frozenset()):
    transport = Failover(servers, [A, B, C], retry_s=retry_s, route_of=lambda request: route)
    transport.avoid(avoid)
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.post(
            "http://a:8000/inference/v1/generate?x=1", json={"n": 1}, headers={"X-Session-ID": "s"}
        )


def route(*servers, **fields):
    return Route(servers=servers or (B, A, C), **fields)


async def test_a_request_goes_to_the_first_server_of_its_route_whole_and_with_its_version():
    servers = Servers(b=200)
    answer = await send(servers, route(min_version=4))
    assert answer.json() == {"n": 1}
    assert str(servers.last.url) == "http://b:8000/inference/v1/generate?x=1"
    assert servers.last.headers["host"] == "b:8000"
    assert servers.last.headers["x-prime-min-version"] == "4"
    assert servers.last.headers["x-session-id"] == "s"


@pytest.mark.parametrize("trouble", [503, 502, 504, 500, httpx.ConnectError("refused"), "half"], ids=str)
async def test_a_request_that_a_server_does_not_answer_goes_to_the_next_and_the_rollout_stays_there(trouble):
    servers, mine = Servers(b=trouble, a=200), route()
    assert (await send(servers, mine)).json() == {"n": 1}
    assert servers.asked == ["b", "a"]
    assert (mine.servers, mine.num_failovers) == ((A, C, B), 1)
    await send(servers, mine)
    assert servers.asked == ["b", "a", "a"]


async def test_a_request_that_is_wrong_is_wrong_everywhere():
    servers, mine = Servers(b=400), route()
    assert (await send(servers, mine)).status_code == 400
    assert mine.num_failovers == 0


async def test_without_patience_every_server_is_asked_once():
    servers, mine = Servers(a=503, b=httpx.ConnectError("refused"), c=503), route()
    assert (await send(servers, mine)).status_code == 503
    assert servers.asked == ["b", "a", "c"]
    assert mine.num_failovers == 2
    with pytest.raises(httpx.ConnectError):
        await send(Servers(b=httpx.ConnectError("refused")), route(B))


async def test_with_patience_the_first_is_asked_again_after_the_others():
    servers = Servers(b=[503, httpx.ReadError("reset"), 200], a=503)
    assert (await send(servers, route(B, A), retry_s=5.0)).status_code == 200
    assert servers.asked == ["b", "a", "b", "a", "b"]


async def test_patience_ends():
    async with asyncio.timeout(5):
        assert (await send(Servers(b=503), route(B), retry_s=0.05)).status_code == 503


@pytest.mark.parametrize("trouble", [500, httpx.ReadError("the answer was lost"), "half"], ids=str)
async def test_the_only_server_is_asked_again_after_an_error_or_a_lost_answer(trouble):
    servers = Servers(b=[trouble, 200])
    assert (await send(servers, route(B), retry_s=60)).json() == {"n": 1}
    assert servers.asked == ["b", "b"]


async def test_a_request_that_servers_cannot_serve_is_not_sent_for_ever():
    servers, mine = Servers(b=500), route(B)
    assert (await send(servers, mine, retry_s=60)).status_code == 500
    assert (servers.asked, mine.num_failovers) == (["b"] * 3, 2)
    servers = Servers(b=500, a=500, c=500)
    assert (await send(servers, route(B, A, C), retry_s=60)).status_code == 500
    assert servers.asked == ["b", "a", "c"]


async def test_lost_servers_are_not_asked_and_what_they_hold_is_sent_elsewhere():
    servers, mine = Servers(b="hang", a=200), route()
    assert (await send(servers, mine, avoid=frozenset({B}))).status_code == 200
    assert servers.asked == ["a"]
    transport = Failover(servers, [A, B], retry_s=0.0, route_of=lambda request: mine)
    async with httpx.AsyncClient(transport=transport) as client:
        asking = asyncio.create_task(client.post("http://a:8000/x"))
        await asyncio.sleep(0.01)
        assert servers.asked == ["a", "b"]
        transport.avoid(frozenset({B}))
        assert (await asking).status_code == 200
    assert mine.num_failovers == 1


async def test_while_all_are_lost_a_request_waits_for_one_that_is_back():
    servers = Servers(a=200, b=200)
    transport = Failover(servers, [A, B], retry_s=5.0, route_of=lambda request: None)
    transport.avoid(frozenset({A, B}))
    async with httpx.AsyncClient(transport=transport) as client:
        asking = asyncio.create_task(client.post("http://a:8000/x"))
        await asyncio.sleep(0.05)
        assert servers.asked == []
        transport.avoid(frozenset({A}))
        assert (await asking).status_code == 200
    assert servers.asked == ["b"]


async def test_a_rollout_that_is_cancelled_leaves_no_request_behind():
    servers = Servers(b="hang")
    transport = Failover(servers, [A, B], retry_s=5.0, route_of=lambda request: route())
    async with httpx.AsyncClient(transport=transport) as client:
        asking = asyncio.create_task(client.post("http://a:8000/x"))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0)
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
    assert not any("exchange" in name for name in names)


async def test_addresses_below_a_path_and_with_a_slash_at_the_end_are_kept():
    servers = Servers(gate=200)
    transport = Failover(
        servers, ["http://gate/one/v1/", "http://gate/two/v1"], retry_s=0.0,
        route_of=lambda request: Route(servers=("http://gate/two/v1",)),
    )  # fmt: skip
    async with httpx.AsyncClient(transport=transport) as client:
        await client.post("http://gate/one/inference/v1/generate")
    assert str(servers.last.url) == "http://gate/two/inference/v1/generate"
