import asyncio
import time

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import digest_of, publish_number

from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import open_clients
from prime_rl.errors import ArtifactError, DeadlineExceeded, InferenceError
from prime_rl.orchestrator import policy as policy_module
from prime_rl.orchestrator.fleet import Fleet, State, Target
from prime_rl.orchestrator.policy import Policy


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, server):
        double.server = server
        yield double


@pytest.fixture
async def fleet(inference):
    """One server, watched."""
    async with open_clients(ClientConfig(base_url=(inference.base_url,))) as clients:
        yield Fleet(clients, model=str(inference.model), outage_timeout_s=0.5)


@pytest.fixture
async def policy(fleet, tmp_path):
    policy = Policy(fleet, tmp_path / "weights")
    await policy.start(5.0)
    return policy


async def relay_until(policy, version):
    """Watch until `version` is served; returns the versions that were told."""
    told = []
    reached = asyncio.Event()

    def on_update(new):
        told.append(new)
        if new == version:
            reached.set()

    tasks = {asyncio.create_task(work) for work in (policy.watch(on_update), policy.fleet.watch(), reached.wait())}
    try:
        done, _ = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
        assert reached.is_set()
        return told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_newest_complete_weights_are_relayed_and_older_ones_are_skipped(policy, inference, tmp_path):
    for step in (1, 2, 3):
        publish_number(tmp_path / "weights", step)
    (tmp_path / "weights" / "step_4").mkdir()
    assert await relay_until(policy, 3) == [3]
    assert inference.updates == [(str(tmp_path / "weights" / "step_3"), 3)]
    assert policy.version == 3
    assert policy.update_s > 0


async def test_weights_are_told_only_once_the_server_serves_them(policy, inference, tmp_path):
    publish_number(tmp_path / "weights", 1)
    served = asyncio.Queue()
    watch = asyncio.create_task(policy.watch(lambda version: served.put_nowait((version, inference.version))))
    assert await served.get() == (1, 1)
    watch.cancel()


async def test_weights_are_noticed_within_a_fraction_of_a_second_and_looking_costs_little(policy, tmp_path):
    told = asyncio.Queue()
    watch = asyncio.create_task(policy.watch(lambda version: told.put_nowait(time.monotonic())))
    cpu = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - cpu < 0.2
    publish_number(tmp_path / "weights", 1)
    published = time.monotonic()
    assert await told.get() - published < 0.3
    watch.cancel()


async def test_weights_whose_next_step_was_skipped_are_found_too(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(policy_module, "LIST_INTERVAL_S", 0.1)
    relaying = asyncio.create_task(relay_until(policy, 5))
    await asyncio.sleep(0.05)
    publish_number(tmp_path / "weights", 5)
    assert await relaying == [5]


async def test_an_outage_that_a_weight_update_runs_into_is_waited_for(policy, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    await relay_until(policy, 2)
    await asyncio.to_thread(inference.server.stop)
    publish_number(tmp_path / "weights", 3)
    relaying = asyncio.create_task(relay_until(policy, 3))
    await asyncio.sleep(0.2)
    inference.server.start()
    assert await relaying == [3]
    assert inference.version == 3


async def test_an_outage_that_lasts_ends_the_run_in_words(policy, inference, tmp_path):
    await asyncio.to_thread(inference.server.stop)
    publish_number(tmp_path / "weights", 1)
    with pytest.raises(InferenceError, match=r"no inference server answered at http.*/health within 0\.5 s"):
        await relay_until(policy, 1)


async def test_weights_that_vanish_before_they_are_loaded_are_an_error_that_names_them(policy, tmp_path):
    with pytest.raises(ArtifactError, match="step_7"):
        await policy.load(Target(version=7, directory=tmp_path / "weights" / "step_7", digest="7"))


async def test_weights_that_the_only_server_refuses_end_the_run_with_its_answer(policy, inference, tmp_path):
    inference.refuses_updates = True
    publish_number(tmp_path / "weights", 1)
    with pytest.raises(InferenceError, match=r"400.*these weights do not fit"):
        await relay_until(policy, 1)


async def test_base_weights_in_the_run_directory_are_loaded_first(fleet, inference, tmp_path):
    publish_number(tmp_path / "weights", 0)
    await Policy(fleet, tmp_path / "weights").start(5.0)
    assert inference.updates == [(str(tmp_path / "weights" / "step_0"), 0)]
    assert (inference.version, inference.digest) == (0, digest_of(0))


@pytest.mark.parametrize("left", [(3, "ab"), (0, "ab")], ids=["after an update", "after its step 0"])
async def test_a_server_with_the_weights_of_another_run_goes_back_to_its_first_model(fleet, inference, tmp_path, left):
    inference.version, inference.digest = left
    inference.is_paused = True
    await Policy(fleet, tmp_path / "weights").start(5.0)
    assert (inference.version, inference.digest, inference.num_reloads) == (0, None, 1)
    assert not inference.is_paused, "the run before may have been killed in the middle of an update"
    assert fleet.servers[0].state is State.UP


async def test_a_fresh_server_is_left_as_it_is(fleet, inference, tmp_path):
    await Policy(fleet, tmp_path / "weights").start(5.0)
    assert (inference.num_reloads, inference.updates) == (0, [])


async def test_where_nothing_may_be_reloaded_a_server_of_another_run_is_refused(fleet, inference, tmp_path):
    inference.version = 3
    with pytest.raises(InferenceError, match=r"serves weights 3 of another run.*reload_weights_on_start"):
        await Policy(fleet, tmp_path / "weights", may_reload=False).start(5.0)


async def test_a_measurement_takes_the_weights_that_are_served(fleet, inference, tmp_path):
    inference.version, inference.digest = 3, "ab"
    await Policy(fleet, tmp_path / "weights").start(5.0, adopt=True)
    assert fleet.may_assign(3)
    assert (inference.num_reloads, inference.updates) == (0, [])


async def test_weights_that_are_not_allowed_yet_wait_although_newer_ones_are_there(policy, inference, tmp_path):
    for step in (1, 2, 3):
        publish_number(tmp_path / "weights", step)
    policy.newest_allowed = lambda: 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await relay_until(policy, 1)
    assert policy.version == 0
    policy.newest_allowed = lambda: 2
    assert await relay_until(policy, 2) == [2]
    assert inference.version == 2


async def test_a_server_with_newer_weights_of_the_run_is_given_those_that_the_run_goes_on_with(
    fleet, inference, tmp_path
):
    for step in (1, 2, 3):
        publish_number(tmp_path / "weights", step)
    inference.version, inference.digest = 3, digest_of(3)
    policy = Policy(fleet, tmp_path / "weights")
    await policy.start(5.0, version=2)
    assert (inference.version, inference.digest, policy.version) == (2, digest_of(2), 2)
    assert fleet.may_assign(2)
    assert not fleet.may_assign(3)
    assert await relay_until(policy, 3) == [3]


async def test_a_server_that_serves_what_the_run_goes_on_with_is_left_as_it_is(fleet, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    inference.version, inference.digest = 2, digest_of(2)
    await Policy(fleet, tmp_path / "weights").start(5.0, version=2)
    assert (inference.num_reloads, inference.updates) == (0, [])


async def test_a_process_that_is_started_again_may_reload_its_own_servers(fleet, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    inference.version, inference.digest = 3, "ab"
    await Policy(fleet, tmp_path / "weights", may_reload=False).start(5.0, version=2, again=True)
    assert (inference.version, inference.digest) == (2, digest_of(2))


async def test_the_newest_complete_weights_up_to_a_step_are_found(fleet, tmp_path):
    policy = Policy(fleet, tmp_path / "weights")
    assert await policy.newest(5) == 0
    for step in (1, 3, 6):
        publish_number(tmp_path / "weights", step)
    (tmp_path / "weights" / "step_5").mkdir()
    assert [await policy.newest(most) for most in (0, 2, 5, 6, None)] == [0, 1, 3, 6, 6]


async def test_weights_that_a_run_goes_on_with_are_waited_for_and_no_longer_than_may_be(fleet, tmp_path):
    policy = Policy(fleet, tmp_path / "weights")
    with pytest.raises(DeadlineExceeded, match=r"weights/step_4, which the run is to go on with, did not appear"):
        await policy.appear(4, 0.1)
    waiting = asyncio.create_task(policy.appear(4, 30.0))
    await asyncio.sleep(0)
    publish_number(tmp_path / "weights", 4)
    await waiting
