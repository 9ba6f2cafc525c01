"""Servers die, hang and come back at random times, on a simulated clock: nothing is lost, counted twice or stale."""

import asyncio
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.doubles.fleet import SimulatedNetwork, SimulatedServer, simulate

from prime_rl import activity
from prime_rl.aio import Supervisor
from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import InferenceClient, Unwell
from prime_rl.environments.verifiers.failover import Failover, Route
from prime_rl.errors import InferenceError
from prime_rl.orchestrator.fleet import Fleet, State, Target
from prime_rl.orchestrator.groups import Dispatch, Example
from prime_rl.orchestrator.scheduler import Scheduler, SchedulerLimits

OUTAGE_S = 60.0


def weights(version):
    return Target(version=version, directory=Path(f"weights/step_{version}"), digest=str(version))


def fleet_of(servers, events=None):
    events = [] if events is None else events
    return Fleet(servers, model="m", outage_timeout_s=OUTAGE_S, on_event=events.append)


def servers_of(number, seed=0):
    return [SimulatedServer(f"s{index}", random.Random(f"{seed}/{index}")) for index in range(number)]


async def run_beside(fleet, main):
    supervisor = Supervisor()
    supervisor.start("fleet", fleet.watch(), endless=True)
    return await supervisor.run("main", main)


async def until(condition, timeout=100.0):
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - the clock is simulated
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time()


@dataclass
class Run:
    """The loops of the orchestrator, over simulated servers: dispatch, rollouts, batches, and a trainer."""

    servers: list[SimulatedServer]
    rng: random.Random
    limits: SchedulerLimits
    events: list[str] = field(default_factory=list)
    shipped: list[tuple[int, list[tuple[int, int, list[int]]]]] = field(default_factory=list)
    """Batches: step, and of every rollout its id, the version at dispatch and the versions of its tokens."""

    def __post_init__(self):
        self.fleet = fleet_of(self.servers, self.events)
        self.scheduler = Scheduler(self.limits, self.on_end)
        self.supervisor = Supervisor()
        self.changed = asyncio.Event()
        self.tasks: dict[int, asyncio.Task] = {}
        self.examples = iter(range(10**6))
        self.trained = asyncio.Queue()
        self.num_failovers = 0
        self.num_blows = 0
        self.transport = Failover(
            SimulatedNetwork(self.servers), [server.base_url for server in self.servers], retry_s=OUTAGE_S,
            route_of=lambda request: self.routes[request.headers["X-Session-ID"]],
        )  # fmt: skip
        self.routes: dict[str, Route] = {}

    async def go(self):
        await self.fleet.start(Target(), 100.0)
        self.fleet.on_change = self.on_servers
        start = self.supervisor.start
        start("fleet", self.fleet.watch(), endless=True)
        start("relay", self.relay(), endless=True)
        start("dispatch", self.dispatch(), endless=True)
        for server in self.servers:
            start(f"fate of {server.base_url}", self.fate(server), endless=True)
        await self.supervisor.run("batches", self.batches())

    def on_servers(self):
        self.transport.avoid(self.fleet.down)
        self.changed.set()

    async def fate(self, server):
        """One server at a time is never touched, so that there is always one that could serve."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 6))
            others = [other for other in self.servers if other is not server]
            if not any(other.is_alive and other._goes_on.is_set() for other in others):
                continue
            self.num_blows += 1
            if self.rng.random() < 0.5:
                server.die()
                await asyncio.sleep(self.rng.expovariate(1 / 5))
                server.come_back()
            else:
                server.hang()
                await asyncio.sleep(self.rng.expovariate(1 / 8))
                server.go_on()

    async def dispatch(self):
        while True:
            self.changed.clear()
            while self.fleet.may_assign(self.scheduler.version):
                dispatch = self.scheduler.next_dispatch(lambda: Example(env="e", index=next(self.examples)))
                if dispatch is None:
                    break
                self.tasks[dispatch.rollout_id] = self.supervisor.start(f"r{dispatch.rollout_id}", self.roll(dispatch))
            await self.changed.wait()

    async def roll(self, dispatch: Dispatch):
        began = asyncio.get_running_loop().time()
        session = str(dispatch.rollout_id)
        servers = self.fleet.assign(dispatch.rollout_id, dispatch.group, dispatch.version)
        first = next(server for server in self.servers if server.base_url == servers[0])
        assert not first.is_alive or first.version >= dispatch.version or not self.fleet_knows(first), (
            "stale assignment"
        )
        self.routes[session] = Route(servers=servers, min_version=dispatch.version)
        try:
            request = httpx.Request(
                "POST", "http://s0:8000/x", headers={"X-Session-ID": session},
                json={"num_tokens": self.rng.randint(1, 40)},
            )  # fmt: skip
            try:
                response = await self.transport.handle_async_request(request)
                ok = response.status_code == 200
            except httpx.TransportError:
                ok = False
            if ok:
                versions = response.json()["versions"]
                assert min(versions) >= dispatch.version
                group = self.scheduler.succeed(dispatch.rollout_id, (dispatch.rollout_id, dispatch.version, versions))
                if group is not None:
                    self.scheduler.accept(group.number, group.results)
            else:
                counts = not await self.fleet.was_disturbed(began)
                self.scheduler.fail(dispatch.rollout_id, "gone", "inference", counts=counts)
        finally:
            self.num_failovers += self.routes.pop(session).num_failovers
            self.fleet.release(dispatch.rollout_id)
            self.tasks.pop(dispatch.rollout_id, None)
        self.changed.set()

    def fleet_knows(self, simulated):
        """Whether what happened to a server last was seen by a probe."""
        server = next(s for s in self.fleet.servers if s.client is simulated)
        return server.instance == simulated.instance

    async def batches(self):
        while not self.scheduler.is_done:
            groups = self.scheduler.take_batch()
            if groups is None:
                await asyncio.sleep(0.05)
                continue
            step = self.scheduler.next_batch - 1
            self.shipped.append((step, [result for group in groups for result in group]))
            self.changed.set()
            self.trained.put_nowait(step + 1)

    async def relay(self):
        while True:
            version = await self.trained.get()
            await asyncio.sleep(self.rng.uniform(0, 3))
            before = self.scheduler.version
            await self.fleet.update(weights(version))
            assert version > before, "the version served never goes back"
            self.scheduler.set_version(version)
            self.changed.set()

    def on_end(self, ended):
        rollout = ended.dispatch.rollout_id
        if ended.result is None and rollout in self.tasks:
            self.tasks[rollout].cancel()


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLEET_SEEDS", "10"))))
def test_whatever_happens_to_servers_no_rollout_is_lost_counted_twice_or_stale(seed):
    rng = random.Random(seed)
    limits = SchedulerLimits(
        batch_target=rng.randint(1, 4), rollouts_per_group=rng.randint(1, 4), max_async_level=rng.randint(0, 2),
        max_off_policy_steps=rng.randint(1, 8), max_attempts=1, max_batches=40,
    )  # fmt: skip

    async def main():
        run = Run(servers_of(rng.randint(2, 4), seed), rng, limits)
        await asyncio.wait_for(run.go(), 3 * 3600)
        return run

    run = simulate(main())
    counters = run.scheduler.counters
    assert counters.groups_given_up == 0, "a lost server is not a rollout's fault"
    assert counters.dispatched == counters.ends.total() + run.scheduler.num_in_flight + run.scheduler.num_held
    ids = [rollout for _, batch in run.shipped for rollout, _, _ in batch]
    assert len(ids) == len(set(ids)) == 40 * limits.batch_target * limits.rollouts_per_group
    bound = limits.max_async_level + limits.max_off_policy_steps if limits.max_async_level else 0
    for step, batch in run.shipped:
        for _, dispatched, versions in batch:
            assert min(versions) >= dispatched
            assert step - min(versions) <= bound
    assert run.num_blows >= 5, "there was something to survive"


def test_work_is_shared_and_a_group_stays_together():
    async def main():
        servers = servers_of(3)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)
        homes = [[fleet.assign(10 * group + index, group, 0)[0] for index in range(4)] for group in range(6)]
        assert all(len(set(home)) == 1 for home in homes)
        assert sorted([home[0] for home in homes].count(server.base_url) for server in servers) == [2, 2, 2]
        assert len(fleet.assign(100, 0, 0)) == 3, "all of them, in case the first is lost"

    simulate(main())


def test_a_dead_server_is_noticed_at_its_next_probe_and_a_hung_one_after_two():
    async def main():
        servers, events = servers_of(3), []
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 10.0)

        async def watch():
            await asyncio.sleep(1.5)
            began = asyncio.get_running_loop().time()
            servers[0].die()
            assert await until(lambda: servers[0].base_url in fleet.down) - began < 1.1
            began = asyncio.get_running_loop().time()
            servers[1].hang()
            assert 9 < await until(lambda: servers[1].base_url in fleet.down) - began < 11.5
            assert [fleet.assign(n, n, 0)[0] for n in range(4)] == [servers[2].base_url] * 4

        await run_beside(fleet, watch())
        assert [event.partition(": ")[0].rpartition(" ")[0] for event in events] == [
            "inference server http://s0:8000/v1 is", "inference server http://s1:8000/v1 is"
        ]  # fmt: skip

    simulate(main())


@pytest.mark.parametrize("gone_s", [0.0, 30.0])
def test_a_server_that_comes_back_gets_the_current_weights_before_it_is_assigned_anything(gone_s):
    async def main():
        servers, events = servers_of(2), []
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 10.0)

        async def watch():
            await fleet.update(weights(3))
            servers[0].die()
            await asyncio.sleep(gone_s)
            servers[0].come_back()
            back = asyncio.get_running_loop().time()
            await until(lambda: fleet.servers[0].state is State.JOINING)
            assert not fleet._is_current(fleet.servers[0])
            assert fleet.assign(1, 1, 3)[0] == servers[1].base_url
            assert await until(lambda: fleet.num_up == 2) - back < 6
            assert servers[0].version == 3

        await run_beside(fleet, watch())
        assert fleet.num_restarts == 1
        assert "is up with weights 3" in events[-1]

    simulate(main())


def test_a_straggler_is_not_waited_for_long_and_joins_when_it_is_done():
    async def main():
        servers = servers_of(3)
        for server, seconds in zip(servers, (0.2, 0.4, 30.0), strict=True):
            server.update_s = (seconds, seconds)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def watch():
            began = asyncio.get_running_loop().time()
            await fleet.update(weights(1))
            assert asyncio.get_running_loop().time() - began < 3
            assert [fleet._is_current(server) for server in fleet.servers] == [True, True, False]
            await fleet.update(weights(2))
            assert [server.version for server in servers] == [2, 2, 0]
            await until(lambda: all(map(fleet._is_current, fleet.servers)))
            assert [server.version for server in servers] == [2, 2, 2]

        await run_beside(fleet, watch())

    simulate(main())


def test_a_server_that_refuses_weights_is_lost_alone_and_given_them_again():
    async def main():
        servers, events = servers_of(2), []
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 10.0)

        async def watch():
            servers[1].refuses = "they do not fit"
            await fleet.update(weights(1))
            await asyncio.sleep(30)
            assert not fleet._is_current(fleet.servers[1])
            assert len(events) == 1, events
            servers[1].refuses = None
            await until(lambda: fleet.num_up == 2)
            assert servers[1].version == 1

        await run_beside(fleet, watch())

    simulate(main())


@pytest.mark.parametrize("number", [1, 2])
def test_weights_that_every_server_refuses_end_the_run_with_their_answer(number):
    async def main():
        servers = servers_of(number)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)
        for server in servers:
            server.refuses = "they do not fit"
        with pytest.raises(InferenceError, match="they do not fit"):
            await run_beside(fleet, fleet.update(weights(1)))

    simulate(main())


def test_when_all_are_gone_for_too_long_the_run_ends_with_a_sentence_about_each():
    async def main():
        servers = servers_of(2)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)
        for server in servers:
            server.die()
        with pytest.raises(InferenceError, match=r"s0:8000/v1 did not answer for 60 s.*; .*s1:8000/v1 did not"):
            await run_beside(fleet, asyncio.sleep(1000))
        return asyncio.get_running_loop().time()

    assert 60 < simulate(main()) < 75


@pytest.mark.parametrize(
    ("names", "is_final", "within_s"),
    [("orchestrator,trainer", True, (60, 75)), ("inference,orchestrator,trainer", False, (200, 215))],
)
def test_servers_that_the_launcher_starts_again_are_waited_for_longer_and_others_end_the_run_for_good(
    monkeypatch, names, is_final, within_s
):
    monkeypatch.setenv(activity.SUPERVISED, names)

    async def main():
        servers = servers_of(1)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 200.0)
        servers[0].die()
        with pytest.raises(InferenceError) as raised:
            await run_beside(fleet, asyncio.sleep(1000))
        assert raised.value.is_final is is_final
        assert ("raise outage_timeout" in str(raised.value)) is is_final
        assert f"did not answer for {within_s[0]} s" in str(raised.value)
        return asyncio.get_running_loop().time()

    assert within_s[0] < simulate(main()) < within_s[1]


def test_a_run_that_has_no_connection_left_for_its_servers_blames_none_and_may_be_started_again():
    async def main():
        servers = servers_of(2)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def cannot_be_asked():
            return Unwell(reason="files ran out", is_silent=True, is_ours=True)

        for server in servers:
            server.probe = cannot_be_asked
        with pytest.raises(InferenceError, match="files ran out") as raised:
            await run_beside(fleet, asyncio.sleep(1000))
        assert not raised.value.is_final, "one that has just begun has all its connections"
        assert "outage_timeout" not in str(raised.value)

    simulate(main())


@pytest.mark.parametrize("gone_s", [30.0, None])
def test_a_server_whose_engine_failed_and_that_somebody_else_watches_has_the_time_of_any_other(gone_s):
    async def main():
        (server,) = servers_of(1)
        fleet = fleet_of([server])
        await fleet.start(Target(), 10.0)
        probe, reason = server.probe, "the inference engine failed: no blocks"

        async def says_so():
            return Unwell(reason=reason, says_so=True)

        async def watch():
            server.probe = says_so
            if gone_s is None:
                await asyncio.sleep(1000)
            await asyncio.sleep(gone_s)
            server.probe = probe
            await until(lambda: fleet.num_up == 1)

        if gone_s is not None:
            await run_beside(fleet, watch())
            return
        with pytest.raises(InferenceError, match=reason):
            await run_beside(fleet, watch())
        assert 60 < asyncio.get_running_loop().time() < 75

    simulate(main())


def test_an_outage_of_all_that_is_short_enough_is_survived():
    async def main():
        servers = servers_of(2)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def watch():
            for _ in range(3):
                began = asyncio.get_running_loop().time()
                for server in servers:
                    server.die()
                asking = [asyncio.create_task(fleet.was_disturbed(began)) for _ in range(64)]
                await asyncio.sleep(40)
                assert not any(task.done() for task in asking)
                servers[1].come_back()
                assert await asyncio.gather(*asking) == [True] * 64
                assert await fleet.was_disturbed(began), "its failure may come in long after"
                assert not await fleet.was_disturbed(asyncio.get_running_loop().time() + 5)

        await run_beside(fleet, watch())

    simulate(main())


def test_a_run_starts_with_the_servers_that_are_there_and_the_others_join():
    async def main():
        servers, events = servers_of(2), []
        servers[1].die()
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 1800.0)
        assert asyncio.get_running_loop().time() < 5
        assert "s1:8000/v1 is not there yet" in events[0]

        async def watch():
            await fleet.update(weights(1))
            servers[1].come_back()
            await until(lambda: fleet.num_up == 2)
            assert servers[1].version == 1

        await run_beside(fleet, watch())

    simulate(main())


def test_weights_that_somebody_else_put_into_a_server_are_replaced():
    async def main():
        servers, events = servers_of(2), []
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 10.0)

        async def watch():
            await fleet.update(weights(2))
            await asyncio.sleep(1)
            servers[0].version = 7
            await until(lambda: servers[0].version == 2)
            assert "serves weights 7 that it was not given" in events[0]

        await run_beside(fleet, watch())

    simulate(main())


def test_behind_a_router_the_servers_are_watched_and_rollouts_go_to_the_router():
    async def main():
        servers = servers_of(2)
        fleet = Fleet(servers, model="m", outage_timeout_s=OUTAGE_S, addresses=["http://router:8000/v1"])
        await fleet.start(Target(), 10.0)

        async def watch():
            servers[0].die()
            await until(lambda: fleet.num_up == 1)
            assert fleet.assign(1, 1, 0) == ("http://router:8000/v1",)
            assert fleet.down == frozenset()

        await run_beside(fleet, watch())

    simulate(main())


def test_while_weights_are_loaded_rollouts_go_on_being_dispatched_with_those_before():
    async def main():
        servers = servers_of(2)
        for server in servers:
            server.update_s = (5.0, 5.0)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def watch():
            updating = asyncio.create_task(fleet.update(weights(1)))
            await asyncio.sleep(1)
            assert fleet.may_assign(0)
            assert not fleet.may_assign(1)
            await updating
            assert fleet.may_assign(1)

        await run_beside(fleet, watch())

    simulate(main())


def test_a_hung_server_keeps_what_it_has_while_there_is_nowhere_else_to_send_it():
    async def main():
        servers = servers_of(2)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def watch():
            servers[0].hang()
            await until(lambda: fleet.num_up == 1)
            assert fleet.down == {servers[0].base_url}
            servers[1].die()
            await until(lambda: fleet.num_up == 0)
            assert fleet.down == frozenset()
            servers[1].come_back()
            await until(lambda: fleet.num_up == 1)
            assert fleet.down == {servers[0].base_url}

        await run_beside(fleet, watch())

    simulate(main())


def test_a_server_that_somebody_else_paused_is_lost_and_resumed_when_it_joins_again():
    async def main():
        servers, events = servers_of(2), []
        fleet = fleet_of(servers, events)
        await fleet.start(Target(), 10.0)

        async def watch():
            servers[0].is_paused = True
            began = asyncio.get_running_loop().time()
            assert await until(lambda: fleet.num_up == 1) - began < 3
            assert any("s0:8000/v1 is lost: it is paused" in event for event in events)
            await until(lambda: fleet.num_up == 2)
            assert not servers[0].is_paused

        await run_beside(fleet, watch())

    simulate(main())


def test_a_server_that_is_paused_for_an_update_is_not_lost_for_it():
    async def main():
        servers = servers_of(1)
        fleet = fleet_of(servers)
        await fleet.start(Target(), 10.0)

        async def watch():
            servers[0].is_paused = fleet.servers[0].is_held = True
            await asyncio.sleep(10)
            assert fleet.num_up == 1
            fleet.servers[0].is_held = servers[0].is_paused = False
            servers[0].update_s = (10.0, 10.0)
            updating = asyncio.create_task(fleet.update(weights(1)))
            servers[0].is_paused = True
            await asyncio.sleep(9)
            assert fleet.num_up == 1
            servers[0].is_paused = False
            await updating

        await run_beside(fleet, watch())

    simulate(main())


async def test_a_server_that_answers_what_nobody_knows_is_lost_alone_and_the_run_goes_on():
    body = {"version": 0, "digest": None, "status": "ok", "instance": "i"}

    def answer(request):
        return httpx.Response(200, json={"data": [{"id": "m"}]} if request.url.path == "/v1/models" else body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        fleet = fleet_of([InferenceClient("http://s0:8000/v1", ClientConfig(), http)])
        (server,) = fleet.servers
        await fleet.start(Target(), 10.0)
        body = {"hello": "world"}
        await fleet._look(server)
        assert server.state is State.DOWN
        assert server.trouble.startswith("http://s0:8000/health answered something else than a server of prime-rl")
        body = {"version": 0, "digest": None, "status": "ok", "instance": "i"}
        await fleet._look(server)
        await server.work
        assert server.state is State.UP
