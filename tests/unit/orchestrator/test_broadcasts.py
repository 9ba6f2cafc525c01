"""The orchestrator's part of weights over NCCL, against the trainer's end of the protocol and simulated servers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.doubles.fleet import simulate
from tests.unit.orchestrator.test_fleet import fleet_of, run_beside, servers_of, until, weights

from prime_rl.aio import Supervisor
from prime_rl.config.artifacts import NCCLBroadcastConfig
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.broadcasts import Broadcasts
from prime_rl.orchestrator.fleet import Target
from prime_rl.orchestrator.policy import Policy
from prime_rl.paths import step_dir
from prime_rl.transport.broadcasts import announce, fall_back, fallback_reason, ready_file, wait_until_ready
from prime_rl.transport.manifest import PublishedWeights, draft_dir


def sent(version: int) -> Target:
    return replace(weights(version), only_for=frozenset())


def group(servers, root: Path, *, gpus: int = 4) -> Broadcasts:
    config = NCCLBroadcastConfig(host="gpu0", port=29502, timeout=30, inference_world_size=gpus)
    return Broadcasts(fleet_of(servers), root, config)


def simulated(root, scenario, *, number=2, gpus=4):
    """Run `scenario(servers, broadcasts)` once the servers joined the group, beside the fleet's loops."""

    async def main():
        servers = servers_of(number)
        broadcasts = group(servers, root, gpus=gpus)
        await broadcasts._fleet.start(Target(), 10.0, wait_for_all=True)
        await broadcasts.open()
        for server in servers:
            server.calls_of_start, server.calls = server.calls, []
        await run_beside(broadcasts._fleet, scenario(servers, broadcasts))

    simulate(main())


def test_every_server_joins_the_group_behind_the_trainer_with_its_share_of_the_gpus(tmp_path):
    async def scenario(servers, broadcasts):
        # host, port, timeout and inference_world_size (4, of two servers) are those of `group`
        assert [server.calls_of_start[-1] for server in servers] == ["join 1/5", "join 3/5"]
        assert {(server.joined.host, server.joined.port, server.joined.timeout) for server in servers} == {
            ("gpu0", 29502, 30)
        }
        assert not broadcasts.is_over()

    simulated(tmp_path, scenario)


def test_gpus_that_do_not_divide_among_the_servers_are_refused(tmp_path):
    async def scenario(servers, broadcasts):
        raise AssertionError("not reached")

    with pytest.raises(ConfigError, match="inference_world_size = 3 does not divide among 2 servers"):
        simulated(tmp_path, scenario, gpus=3)


def test_a_step_is_taken_by_all_paused_servers_together_and_then_they_go_on(tmp_path):
    async def scenario(servers, broadcasts):
        assert await broadcasts.relay(sent(1))
        assert [server.version for server in servers] == [1, 1]
        assert [server.calls for server in servers] == [["pause", "resume"]] * 2
        assert wait_until_ready(tmp_path, 1, timeout=0.1)
        assert not broadcasts.is_over()

    simulated(tmp_path, scenario)


def test_a_server_that_came_back_is_not_of_the_group_and_weights_come_as_files(tmp_path):
    async def scenario(servers, broadcasts):
        assert await broadcasts.relay(sent(1))
        servers[1].die()
        servers[1].come_back()
        await until(lambda: servers[1].instance == broadcasts._fleet.servers[1].instance)
        await asyncio.sleep(10)
        assert servers[1].version == 0, "what was sent is in no file"
        assert not broadcasts._fleet._is_current(broadcasts._fleet.servers[1])
        assert not await broadcasts.relay(sent(2))
        assert fallback_reason(tmp_path) == "http://s1:8000/v1 is lost: it was started again"
        assert not ready_file(tmp_path, 2).exists()
        await broadcasts._fleet.update(weights(2))
        await until(lambda: [server.version for server in servers] == [2, 2])

    simulated(tmp_path, scenario)


def test_a_failed_update_falls_back_and_the_same_step_comes_as_files(tmp_path):
    async def scenario(servers, broadcasts):
        servers[0].refuses = "a tensor is missing"
        assert not await broadcasts.relay(sent(1))
        assert fallback_reason(tmp_path) == "http://s0:8000/v1 is lost: a tensor is missing"
        servers[0].refuses = None
        await broadcasts._fleet.update(weights(1))
        assert servers[0].version == 1

    simulated(tmp_path, scenario, number=1, gpus=1)


def test_when_the_trainer_gives_up_in_the_middle_nobody_waits_for_it(tmp_path):
    async def scenario(servers, broadcasts):
        for server in servers:
            server.update_s = (1000.0, 1000.0)
        relaying = asyncio.create_task(broadcasts.relay(sent(1)))
        await asyncio.sleep(5)
        assert not relaying.done()
        fall_back(tmp_path, "the send took too long")
        began = asyncio.get_running_loop().time()
        assert not await relaying
        assert asyncio.get_running_loop().time() - began < 2
        assert fallback_reason(tmp_path) == "the send took too long"
        for server in servers:
            server.update_s = (0.1, 0.1)
        await broadcasts._fleet.update(weights(1))
        assert 1 in [server.version for server in servers], "the same step as files"

    simulated(tmp_path, scenario)


def test_a_trainer_that_gave_up_before_is_not_kept_waiting_for(tmp_path):
    async def scenario(servers, broadcasts):
        fall_back(tmp_path, "no group")
        assert not await broadcasts.relay(sent(1))
        assert servers[0].calls == []

    simulated(tmp_path, scenario)


def test_a_server_that_is_not_there_at_the_start_means_files(tmp_path):
    async def main():
        servers = servers_of(2)
        broadcasts = group(servers, tmp_path)
        await broadcasts._fleet.start(Target(), 10.0)
        servers[1].die()
        await broadcasts.open()
        assert "the group could not be formed" in (fallback_reason(tmp_path) or "")

    simulate(main())


def test_a_server_that_does_not_go_on_after_an_update_is_lost_until_it_was_resumed(tmp_path):
    async def scenario(servers, broadcasts):
        servers[1].does_not_resume = True
        assert await broadcasts.relay(sent(1))
        fleet = broadcasts._fleet
        assert fleet.down == {servers[1].base_url}
        assert "it was not resumed: POST /resume answered 500" in fleet.servers[1].trouble
        assert fallback_reason(tmp_path) == "http://s1:8000/v1 is lost: it was not resumed: POST /resume answered 500"
        servers[1].does_not_resume = False
        await until(lambda: fleet.num_up == 2)
        assert not servers[1].is_paused

    simulated(tmp_path, scenario)


def test_a_lost_server_of_the_group_means_files_at_once_and_not_only_at_the_next_step(tmp_path):
    async def scenario(servers, broadcasts):
        servers[0].die()
        await until(lambda: broadcasts.is_over(), timeout=10)
        assert (fallback_reason(tmp_path) or "").startswith("http://s0:8000/v1 is lost: ")

    simulated(tmp_path, scenario)


def test_the_only_server_that_was_started_again_gets_the_weights_that_were_sent_once_they_are_files(tmp_path):
    async def main():
        (server,) = servers = servers_of(1)
        broadcasts = group(servers, tmp_path / "broadcasts", gpus=1)
        fleet = broadcasts._fleet
        policy = Policy(fleet, tmp_path / "weights", broadcasts=broadcasts)
        await fleet.start(Target(), 10.0, wait_for_all=True)
        await broadcasts.open()

        async def scenario():
            announce(broadcasts.directory, 1, PublishedWeights(kind="nccl", digest="1", tensors={}))
            await until(lambda: policy.version == 1)
            server.die()
            server.come_back()
            await until(broadcasts.is_over, timeout=10)
            await asyncio.sleep(10)
            assert fleet.num_up == 0, "there is no file yet"
            publish(tmp_path / "weights", 1)
            await until(lambda: fleet.num_up == 1, timeout=10)
            assert (server.version, policy.version) == (1, 1)
            await asyncio.sleep(1)
            assert policy.num_updates == 2, "once each way"

        async def relay():
            while True:  # `Policy.watch` without its thread, which a simulated clock cannot wait for
                if target := policy._next():
                    await policy.load(target)
                await asyncio.sleep(0.1)

        supervisor = Supervisor()
        supervisor.start("fleet", fleet.watch(), endless=True)
        supervisor.start("policy", relay(), endless=True)
        await supervisor.run("main", scenario())

    simulate(main())


def test_servers_are_not_waited_for_once_the_trainer_cannot_meet_them(tmp_path):
    async def main():
        servers = servers_of(2)
        for server in servers:
            server.join_s = 1000.0
        broadcasts = group(servers, tmp_path)
        await broadcasts._fleet.start(Target(), 10.0)
        opening = asyncio.create_task(broadcasts.open())
        await asyncio.sleep(5)
        assert not opening.done()
        fall_back(tmp_path, "address already in use")
        async with asyncio.timeout(2):
            await opening
        assert not await broadcasts.relay(sent(1))
        assert fallback_reason(tmp_path) == "address already in use"

    simulate(main())


@pytest.mark.parametrize(("timeout", "told"), [(1200, 300), (7, 7)])
def test_a_server_is_not_told_to_wait_for_the_others_longer_than_vllm_does(tmp_path, timeout, told):
    async def main():
        (server,) = servers_of(1)
        config = NCCLBroadcastConfig(timeout=timeout)
        broadcasts = Broadcasts(fleet_of([server]), tmp_path, config)
        await broadcasts._fleet.start(Target(), 10.0)
        await broadcasts.open()
        assert server.joined.timeout == told

    simulate(main())


def test_the_regular_end_is_no_fallback(tmp_path):
    async def scenario(servers, broadcasts):
        broadcasts.close()
        assert broadcasts.is_over()
        assert fallback_reason(tmp_path) is None

    simulated(tmp_path, scenario)


def publish(root: Path, step: int) -> None:
    with draft_dir(step_dir(root, step), durable=False) as draft:
        draft.weights = PublishedWeights(kind="model", digest=str(step), tensors={})


def test_the_policy_takes_the_newest_of_announcements_and_files_and_only_files_after_a_fallback(tmp_path):
    broadcasts = group(servers_of(1), tmp_path / "broadcasts", gpus=1)
    policy = Policy(broadcasts._fleet, tmp_path / "weights", broadcasts=broadcasts)

    def newest() -> tuple[int, bool] | None:
        policy._listed_at = -10.0
        target = policy._newest()
        return target and (target.version, target.only_for is not None)

    assert newest() is None
    announce(tmp_path / "broadcasts", 1, PublishedWeights(kind="nccl", digest="1", tensors={}))
    assert newest() == (1, True)
    publish(tmp_path / "weights", 2)
    assert newest() == (2, False)
    announce(tmp_path / "broadcasts", 3, PublishedWeights(kind="nccl", digest="3", tensors={}))
    assert newest() == (3, True)
    policy.close()
    assert newest() == (2, False)
    assert fallback_reason(tmp_path / "broadcasts") is None


def test_an_orchestrator_that_is_started_again_has_weights_come_as_files(tmp_path):
    broadcasts = group(servers_of(2), tmp_path / "again")
    broadcasts.begin(again=False)
    assert not broadcasts.is_over()
    broadcasts.begin(again=True)
    assert fallback_reason(tmp_path / "again") == "the orchestrator was started again"
    left = group(servers_of(2), tmp_path / "left")
    announce(tmp_path / "left", 3, PublishedWeights(kind="nccl", digest="3", tensors={}))
    left.begin(again=False)
    assert left.is_over(), "somebody sent weights before it was there"


def test_a_policy_that_is_started_again_forms_no_group(tmp_path):
    async def main():
        servers = servers_of(2)
        broadcasts = group(servers, tmp_path / "broadcasts")
        policy = Policy(broadcasts._fleet, tmp_path / "weights", broadcasts=broadcasts)
        await policy.start(10.0, again=True)
        assert [call for server in servers for call in server.calls if call.startswith("join")] == []
        assert broadcasts.is_over()

    asyncio.run(main())
