import asyncio
import time

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import publish_number

from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import open_client
from prime_rl.errors import ArtifactError, InferenceError
from prime_rl.orchestrator.policy import Policy


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, server):
        double.server = server
        yield double


@pytest.fixture
async def policy(inference, tmp_path):
    async with open_client(ClientConfig(base_url=(inference.base_url,))) as client:
        yield Policy(client, tmp_path / "weights", outage_timeout_s=0.5)


async def relay_until(policy, version):
    """Watch until `version` is served; returns the versions that were told."""
    told = []
    reached = asyncio.Event()

    def on_update(new):
        told.append(new)
        if new == version:
            reached.set()

    watch = asyncio.create_task(policy.watch(on_update))
    waiting = asyncio.create_task(reached.wait())
    try:
        await asyncio.wait({watch, waiting}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            await watch
        assert reached.is_set()
        return told
    finally:
        watch.cancel()
        waiting.cancel()
        await asyncio.gather(watch, waiting, return_exceptions=True)


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


async def test_a_server_that_is_well_was_not_gone(policy):
    assert await policy.survive_outage(time.monotonic()) is False


async def test_a_server_that_comes_back_with_older_weights_is_brought_up_to_date(policy, inference, tmp_path):
    publish_number(tmp_path / "weights", 1)
    await relay_until(policy, 1)
    inference.version = 0
    assert await policy.survive_outage(time.monotonic()) is True
    assert inference.version == 1


async def test_an_outage_is_waited_for_while_it_is_short(policy, inference):
    await asyncio.to_thread(inference.server.stop)
    surviving = asyncio.create_task(policy.survive_outage(time.monotonic()))
    await asyncio.sleep(0.1)
    inference.server.start()
    assert await surviving is True


async def test_every_rollout_of_before_the_end_of_an_outage_met_it_and_none_of_later(policy, inference):
    dispatched_at = time.monotonic()
    await asyncio.to_thread(inference.server.stop)
    surviving = [asyncio.create_task(policy.survive_outage(dispatched_at)) for _ in range(128)]
    await asyncio.sleep(0.1)
    inference.server.start()
    assert await asyncio.gather(*surviving) == [True] * 128
    assert await policy.survive_outage(dispatched_at) is True, "its failure may come in long after"
    assert await policy.survive_outage(time.monotonic()) is False


async def test_an_outage_that_a_weight_update_runs_into_is_one_for_rollouts_too(policy, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    await relay_until(policy, 2)
    dispatched_at = time.monotonic()
    await asyncio.to_thread(inference.server.stop)
    publish_number(tmp_path / "weights", 3)
    relaying = asyncio.create_task(relay_until(policy, 3))
    await asyncio.sleep(0.2)
    inference.server.start()
    assert await relaying == [3]
    assert await policy.survive_outage(dispatched_at) is True
    dispatched_at = time.monotonic()
    inference.version = 0
    publish_number(tmp_path / "weights", 4)
    await relay_until(policy, 4)
    assert await policy.survive_outage(dispatched_at) is True, "it was started again before the update"


async def test_an_outage_that_lasts_ends_the_run_in_words(policy, inference, tmp_path):
    await asyncio.to_thread(inference.server.stop)
    with pytest.raises(InferenceError, match=r"no inference server answered at http.*/health within 0\.5 s"):
        await policy.survive_outage(time.monotonic())
    publish_number(tmp_path / "weights", 1)
    with pytest.raises(InferenceError, match="no inference server answered"):
        await relay_until(policy, 1)


async def test_weights_that_vanish_before_they_are_loaded_are_an_error_that_names_them(policy, tmp_path):
    with pytest.raises(ArtifactError, match="step_7"):
        await policy._load(7)
