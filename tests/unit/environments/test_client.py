import asyncio
import os
import re
import resource
import socket
from contextlib import contextmanager, suppress

import httpx
import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import publish_number

from prime_rl import activity
from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import InferenceClient, Unreachable, Unwell, open_clients
from prime_rl.errors import DiskError, InferenceError
from prime_rl.transport.api import InitTransferRequest


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, server):
        double.server = server
        yield double


@pytest.fixture
async def client(inference):
    async with open_clients(ClientConfig(base_url=(inference.base_url,))) as (client,):
        yield client


async def test_health_says_which_weights_are_served_by_which_start_of_the_server(client, inference):
    inference.version, inference.digest = 6, "ab"
    health = await client.wait_ready(1.0)
    assert (health.version, health.digest, health.instance) == (6, "ab", inference.instance)
    inference.server.stop()
    assert await client.health() is None
    assert (await client.probe()).is_silent is False, "nobody listens"
    inference.server.start()
    again = await client.health()
    assert (again.version, again.digest) == (0, None)
    assert again.instance != health.instance


async def test_a_server_that_takes_the_question_and_never_answers_is_silent(monkeypatch):
    monkeypatch.setattr("prime_rl.environments.client.PROBE_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with open_clients(ClientConfig(base_url=(f"http://127.0.0.1:{port}/v1",))) as (client,):
            assert await client.probe() == Unwell(reason="no answer within 0.1 s", is_silent=True)


async def test_a_client_is_made_for_every_server_and_those_behind_a_router_are_named_apart():
    config = ClientConfig(base_url=("http://a:1/v1", "http://b:2/v1/"))
    async with open_clients(config) as clients:
        assert [client.base_url for client in clients] == ["http://a:1/v1", "http://b:2/v1"]
    behind = config.model_copy(update={"admin_base_url": ("http://c:3/v1",)})
    async with open_clients(behind) as clients:
        assert [client.base_url for client in clients] == ["http://c:3/v1"]


async def test_a_proxy_of_the_surroundings_is_not_asked(inference, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with open_clients(ClientConfig(base_url=(inference.base_url,))) as (client,):
        assert (await client.health()).version == 0


async def test_headers_go_with_every_request_and_outdo_the_key(inference, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_KEY", "s3cret")
    config = ClientConfig(base_url=(inference.base_url,), api_key_var="SOME_KEY", headers={"X-Team": "blue"})
    publish_number(tmp_path / "weights", 1)
    async with open_clients(config) as (client,):
        await client.health()
        await client.check_model(str(inference.model))
        await client.update_weights(tmp_path / "weights" / "step_1", 1)
    for path in ("/health", "/v1/models", "/update_weights"):
        assert inference.headers[path]["x-team"] == "blue"
        assert inference.headers[path]["authorization"] == "Bearer s3cret"
    own = config.model_copy(update={"headers": {"Authorization": "Basic abc"}})
    async with open_clients(own) as (client,):
        await client.health()
    assert inference.headers["/health"]["authorization"] == "Basic abc"


async def test_a_server_of_another_model_is_refused_unless_it_shall_not_be_asked(inference):
    config = ClientConfig(base_url=(inference.base_url,))
    async with open_clients(config) as (client,):
        with pytest.raises(InferenceError, match="not another; start it with the same model name"):
            await client.check_model("another")
    inference.headers.clear()
    async with open_clients(config.model_copy(update={"skip_model_check": True})) as (client,):
        await client.check_model("another")
    assert inference.headers == {}


async def test_waiting_for_a_server_ends_with_its_address(client, inference):
    inference.server.stop()
    with pytest.raises(InferenceError, match=rf"answered at {inference.base_url[:-3]}/health within 0\.2 s"):
        await client.wait_ready(0.2)


@pytest.mark.parametrize(
    ("names", "is_final", "seconds"), [("orchestrator,trainer", True, "0.2"), ("inference,trainer", False, "0.4")]
)
async def test_a_server_that_the_launcher_did_not_start_is_waited_for_once(
    monkeypatch, client, inference, names, is_final, seconds
):
    monkeypatch.setenv(activity.SUPERVISED, names)
    inference.server.stop()
    address = re.escape(client.base_url.removesuffix("/v1"))
    with pytest.raises(
        InferenceError, match=rf"at {address}/health within {seconds} s; .* correct client.base_url"
    ) as raised:
        await client.wait_ready(0.2)
    assert raised.value.is_final is is_final


@pytest.fixture
def no_handles_left():
    """This process can open nothing while the block runs that this gives."""

    @contextmanager
    def exhausted():
        limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limits[1]))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            yield
        finally:
            for file in taken:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return exhausted


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_process_without_a_connection_left_does_not_blame_the_server(no_handles_left, host):
    words = r"as many files and connections open as it may, \d+: allow more .* ulimit -n 65536"
    async with open_clients(ClientConfig(base_url=(f"http://{host}:9/v1",))) as (client,):
        await client.probe()  # loads what is loaded at the first request
        with no_handles_left():
            state = await client.probe()
            assert (state.is_ours, state.is_silent) == (True, True)
            with pytest.raises(Unreachable, match=words):
                await client.resume()
            with pytest.raises(DiskError, match=rf"^the server at http://{host}:9/health could not be asked.*{words}"):
                await client.wait_ready(0.2)
        state = await client.probe()
        assert (state.is_ours, state.is_silent) == (False, False)


async def test_waiting_for_a_server_that_is_unwell_ends_with_its_own_reason(client, inference):
    inference.unwell = "the inference engine was closed"
    assert await client.health() is None
    with pytest.raises(InferenceError, match=r"/health is not well after 0\.2 s: the inference engine was closed; "):
        await client.wait_ready(0.2)


async def test_a_server_whose_engine_failed_is_waited_for_and_told_with_its_reason(client, inference):
    inference.unwell = "the inference engine failed: MemoryError: no blocks"
    waiting = asyncio.create_task(client.wait_ready(60))
    await asyncio.sleep(0.5)
    inference.unwell = None
    assert (await waiting).version == 0
    inference.unwell = "the inference engine failed: MemoryError: no blocks"
    with pytest.raises(InferenceError, match=r"after 0\.2 s: the inference engine failed: MemoryError: no blocks"):
        await client.wait_ready(0.2)


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


async def test_the_model_that_a_server_was_started_with_is_served_again(client, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    await client.update_weights(tmp_path / "weights" / "step_2", 2)
    served = await client.reload_weights()
    assert (served.version, served.digest, inference.version) == (0, None, 0)


async def test_a_server_that_went_away_is_told_apart_from_one_that_refuses(client, inference, tmp_path):
    publish_number(tmp_path / "weights", 2)
    inference.refuses_updates = True
    with pytest.raises(InferenceError, match=r"400.*do not fit") as refused:
        await client.update_weights(tmp_path / "weights" / "step_2", 2)
    assert not isinstance(refused.value, Unreachable)
    inference.unwell = "the server is stopping"
    with pytest.raises(Unreachable, match=r"503.*is stopping"):
        await client.update_weights(tmp_path / "weights" / "step_2", 2)
    inference.server.stop()
    with pytest.raises(Unreachable):
        await client.update_weights(tmp_path / "weights" / "step_2", 2)


async def test_a_server_joins_the_trainers_group(client, inference):
    await client.init_transfer(InitTransferRequest(host="gpu0", port=29501, rank_offset=1, world_size=2))
    assert inference.transfers == [
        {"host": "gpu0", "port": 29501, "rank_offset": 1, "world_size": 2, "timeout": 1200.0}
    ]


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
    async with open_clients(config) as (client,):
        with pytest.raises(InferenceError, match=r"401.*into the environment variable TEST_KEY"):
            await client.check_model(str(inference.model))
    monkeypatch.setenv("TEST_KEY", "s3cret")
    async with open_clients(config) as (client,):
        await client.check_model(str(inference.model))


@pytest.mark.parametrize("body", ["<html>", '"text"', '{"data": {}}', '{"data": [1]}', "[]"])
async def test_a_list_of_models_that_is_none_is_an_answer_of_somebody_else(body):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    async with httpx.AsyncClient(transport=transport) as http:
        client = InferenceClient("http://a:1/v1", ClientConfig(), http)
        with pytest.raises(
            InferenceError, match="http://a:1/v1/models answered something else than a server of prime-rl"
        ):
            await client.check_model("m")
        state = await client.probe()
        assert isinstance(state, Unwell)
        assert state.reason.startswith("http://a:1/health answered something else than a server of prime-rl")
