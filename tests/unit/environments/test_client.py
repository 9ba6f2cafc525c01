import asyncio

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import publish_number

from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import open_client
from prime_rl.errors import InferenceError


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, server):
        double.server = server
        yield double


@pytest.fixture
async def client(inference):
    async with open_client(ClientConfig(base_url=(inference.base_url,))) as client:
        yield client


async def test_health_is_the_version_served_or_none(client, inference):
    inference.version = 6
    assert await client.health() == 6
    assert await client.wait_ready(1.0) == 6
    inference.server.stop()
    assert await client.health() is None


async def test_a_proxy_of_the_surroundings_is_not_asked(inference, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with open_client(ClientConfig(base_url=(inference.base_url,))) as client:
        assert await client.health() == 0


async def test_headers_go_with_every_request_and_outdo_the_key(inference, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_KEY", "s3cret")
    config = ClientConfig(base_url=(inference.base_url,), api_key_var="SOME_KEY", headers={"X-Team": "blue"})
    publish_number(tmp_path / "weights", 1)
    async with open_client(config) as client:
        await client.health()
        await client.check_model(str(inference.model))
        await client.update_weights(tmp_path / "weights" / "step_1", 1)
    for path in ("/health", "/v1/models", "/update_weights"):
        assert inference.headers[path]["x-team"] == "blue"
        assert inference.headers[path]["authorization"] == "Bearer s3cret"
    own = config.model_copy(update={"headers": {"Authorization": "Basic abc"}})
    async with open_client(own) as client:
        await client.health()
    assert inference.headers["/health"]["authorization"] == "Basic abc"


async def test_a_server_of_another_model_is_refused_unless_it_shall_not_be_asked(inference):
    config = ClientConfig(base_url=(inference.base_url,))
    async with open_client(config) as client:
        with pytest.raises(InferenceError, match="not another; start it with the same model name"):
            await client.check_model("another")
    inference.headers.clear()
    async with open_client(config.model_copy(update={"skip_model_check": True})) as client:
        await client.check_model("another")
    assert inference.headers == {}


async def test_waiting_for_a_server_ends_with_its_address(client, inference):
    inference.server.stop()
    with pytest.raises(InferenceError, match=rf"answered at {inference.base_url[:-3]}/health within 0\.2 s"):
        await client.wait_ready(0.2)


async def test_waiting_for_a_server_that_is_unwell_ends_with_its_own_reason(client, inference):
    inference.unwell = "the inference engine was closed"
    assert await client.health() is None
    with pytest.raises(InferenceError, match=r"/health is not well after 0\.2 s: the inference engine was closed; "):
        await client.wait_ready(0.2)


async def test_a_server_whose_engine_failed_is_not_waited_for(client, inference):
    inference.unwell = "the inference engine failed: MemoryError: no blocks"
    async with asyncio.timeout(5):
        with pytest.raises(InferenceError, match=r"/health says: the inference engine failed: MemoryError: no blocks"):
            await client.wait_ready(60)


async def test_a_model_that_is_not_served_is_told_with_those_that_are(client, inference):
    await client.check_model(str(inference.model))
    with pytest.raises(InferenceError, match=f"serves {inference.model}, not other"):
        await client.check_model("other")


async def test_an_update_sends_the_absolute_directory_and_compares_digests(client, inference, tmp_path, monkeypatch):
    publish_number(tmp_path / "weights", 2)
    monkeypatch.chdir(tmp_path)
    await client.update_weights((tmp_path / "weights" / "step_2").relative_to(tmp_path), 2)
    assert inference.updates == [(str(tmp_path / "weights" / "step_2"), 2)]
    inference.digest_of = lambda directory: "0" * 32
    with pytest.raises(InferenceError, match=r"answered with weights 2 of digest 0{32} when asked for 2 of digest"):
        await client.update_weights(tmp_path / "weights" / "step_2", 2)


async def test_pause_and_resume_reach_the_server(client, inference):
    await client.pause()
    assert inference.is_paused
    await client.resume()
    assert not inference.is_paused


async def test_a_server_that_asks_for_a_key_is_told_apart_and_gets_the_key_of_the_environment(
    inference, tmp_path, monkeypatch
):
    inference.api_key = "s3cret"
    config = ClientConfig(base_url=(inference.base_url,), api_key_var="TEST_KEY")
    async with open_client(config) as client:
        with pytest.raises(InferenceError, match=r"401.*into the environment variable TEST_KEY"):
            await client.check_model(str(inference.model))
    monkeypatch.setenv("TEST_KEY", "s3cret")
    async with open_client(config) as client:
        await client.check_model(str(inference.model))
