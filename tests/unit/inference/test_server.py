import asyncio
import contextlib
import signal
import socket

import httpx
import pytest
import uvicorn

from prime_rl import activity, lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError, InferenceError, ModelError
from prime_rl.inference import server
from prime_rl.inference.backend import EngineFailed
from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.http_server import bind
from prime_rl.inference.server import API_KEY_VARIABLE, api_key_of, build_server, choose_backend, host_of, run, serve
from prime_rl.inference.service import Service


def config(**fields):
    return InferenceConfig.model_validate(fields)


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)


def test_without_a_key_only_loopback_is_served():
    assert host_of(config(), None) == "127.0.0.1"


def test_with_a_key_all_interfaces_are_served():
    assert host_of(config(), "key") == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_a_loopback_host_needs_no_key(host):
    assert host_of(config(server={"host": host}), None) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_any_other_host_needs_a_key(host):
    with pytest.raises(ConfigError, match=r"server\.host"):
        host_of(config(server={"host": host}), None)
    assert host_of(config(server={"host": host}), "key") == host


def test_the_configured_key_comes_before_the_environments(monkeypatch):
    assert api_key_of(config()) is None
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    assert api_key_of(config()) == "from the environment"
    assert api_key_of(config(api_key="mine")) == "mine"
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    assert api_key_of(config()) is None


def test_a_launched_server_takes_its_key_from_the_configuration_alone(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    monkeypatch.setenv(lifeline.VARIABLE, "1:2")
    assert api_key_of(config()) is None
    assert api_key_of(config(api_key="mine")) == "mine"


def test_a_port_that_is_taken_is_one_sentence(free_port):
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(ConfigError) as caught:
        bind("127.0.0.1", free_port)
    assert f"port {free_port} on 127.0.0.1 is already in use" in str(caught.value)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_port_zero_takes_a_free_port():
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.fixture
def machine(monkeypatch):
    """Says whether vLLM is installed and a GPU visible."""

    def say(*, has_vllm, has_gpu):
        find = lambda name: object() if name == "vllm" and has_vllm else None  # noqa: E731
        monkeypatch.setattr(server.importlib.util, "find_spec", find)
        monkeypatch.setattr(server.torch.cuda, "is_available", lambda: has_gpu)

    return say


@pytest.mark.parametrize(
    ("has_vllm", "has_gpu", "chosen"),
    [(True, True, "vllm"), (True, False, "embedded"), (False, True, "embedded"), (False, False, "embedded")],
)
def test_auto_takes_vllm_where_it_is_installed_and_a_gpu_is_visible(machine, has_vllm, has_gpu, chosen):
    machine(has_vllm=has_vllm, has_gpu=has_gpu)
    assert choose_backend(config()) == chosen
    assert choose_backend(config(device="cpu")) == choose_backend(config(backend="embedded")) == "embedded"


def test_auto_takes_our_engine_where_it_must_be_deterministic(machine):
    machine(has_vllm=True, has_gpu=True)
    assert choose_backend(config(deterministic=True)) == "embedded"
    with pytest.raises(ValueError, match="vLLM's numbers depend on what is computed beside a request"):
        config(deterministic=True, backend="vllm")


def test_vllm_can_be_asked_for_without_a_gpu(machine):
    machine(has_vllm=True, has_gpu=False)
    assert choose_backend(config(backend="vllm")) == "vllm"


def test_asking_for_vllm_where_it_is_not_installed_says_how_to_install_it(machine):
    machine(has_vllm=False, has_gpu=True)
    with pytest.raises(ConfigError, match=r"pip install 'prime-rl\[vllm\]'"):
        run(config(backend="vllm"))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"parallel": {"tp": 2}}, "parallel.tp = 2"),
        ({"kv_cache_offload": {}}, "kv_cache_offload = "),
        ({"model": {"rope_scaling": {"type": "linear"}}}, "model.rope_scaling = "),
        ({"enable_expert_parallel": True}, "enable_expert_parallel = True"),
        ({"weight_broadcast": {"type": "nccl"}}, "weight_broadcast.type = 'nccl'"),
        ({"vllm": {"quantization": "fp8"}}, "vllm = {'quantization': 'fp8'}"),
    ],
)
def test_what_only_vllm_can_do_is_refused_by_the_embedded_engine(machine, fields, key):
    machine(has_vllm=False, has_gpu=True)
    with pytest.raises(ConfigError) as caught:
        choose_backend(config(**fields))
    assert key in str(caught.value)
    assert "pip install" in str(caught.value)
    machine(has_vllm=True, has_gpu=False)
    with pytest.raises(ConfigError, match="set backend = 'vllm'"):
        choose_backend(config(**fields))
    assert choose_backend(config(backend="vllm", **fields)) == "vllm"


def test_a_taken_port_is_found_before_the_model_is_loaded(free_port):
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(ConfigError, match="already in use"):
        run(config(server={"port": free_port}, model={"name": "/no/such/model"}))


def test_a_missing_model_is_a_model_error(tmp_path):
    with pytest.raises(ModelError):
        run(config(server={"port": 0}, model={"name": str(tmp_path / "nothing")}))


@pytest.fixture
def own_signals():
    """The handlers that `serve` replaces, put back at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_a_server_whose_engine_fails_answers_what_is_in_flight_and_ends(
    own_signals, make_backend, tokenizer, eventually
):
    backend = make_backend()
    backend.gate.clear()
    administration = EmbeddedAdministration(backend, first=backend.weights().items)
    service = Service.build(
        backend, tokenizer, model_name="tiny", model_root="/models/tiny", administration=administration
    )
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(serve(service, listener, None))
        await eventually(lambda: bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}))
            await eventually(lambda: bool(backend.running))
            backend.failure = EngineFailed("the inference engine failed: out of magic")
            backend.gate.set()
            answer = await asked
        assert answer.status_code == 503
        assert "out of magic" in answer.json()["error"]["message"]
        async with asyncio.timeout(20):
            with pytest.raises(InferenceError, match=r"^the inference engine failed: out of magic$"):
                await serving
    assert backend.closed


async def test_a_server_that_is_told_to_stop_ends_without_an_error(own_signals, make_backend, tokenizer, eventually):
    backend = make_backend()
    administration = EmbeddedAdministration(backend, first=backend.weights().items)
    service = Service.build(
        backend, tokenizer, model_name="tiny", model_root="/models/tiny", administration=administration
    )
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(serve(service, listener, None))
        await eventually(lambda: bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await serving
    assert backend.closed


async def test_being_told_to_stop_before_uvicorn_listens_to_signals_is_not_lost(
    own_signals, make_backend, tokenizer, monkeypatch
):
    backend = make_backend()
    administration = EmbeddedAdministration(backend, first=backend.weights().items)
    service = Service.build(
        backend, tokenizer, model_name="tiny", model_root="/models/tiny", administration=administration
    )
    serve_http = uvicorn.Server.serve

    async def told(self, sockets=None):
        signal.raise_signal(signal.SIGINT)
        await serve_http(self, sockets)

    monkeypatch.setattr(uvicorn.Server, "serve", told)
    with bind("127.0.0.1", 0) as listener:
        async with asyncio.timeout(20):
            await serve(service, listener, None)
    assert backend.closed


def test_a_router_is_refused_by_a_server_that_stands_alone(free_port):
    with pytest.raises(ConfigError, match=r"start vllm-router yourself.*client\.base_url.*client\.admin_base_url"):
        run(config(router=True, server={"port": free_port}))


def test_an_offloaded_cache_is_computed_anew_and_cannot_be_kept():
    assert config(kv_cache_offload={}).kv_cache_on_update == "recompute"
    assert config(kv_cache_offload=None).kv_cache_on_update == "keep"
    written = config(kv_cache_offload={}, kv_cache_on_update="recompute").model_dump()
    assert config(**written).kv_cache_on_update == "recompute"
    with pytest.raises(ValueError, match="kv_cache_offload needs kv_cache_on_update = 'recompute'"):
        config(kv_cache_offload={}, kv_cache_on_update="keep")


async def test_a_server_gets_on_without_a_request_but_not_while_somebody_waits_for_weights(make_backend, tokenizer):
    administration = EmbeddedAdministration(backend := make_backend(), first=backend.weights().items)
    service = Service.build(
        backend, tokenizer, model_name="tiny", model_root="/models/tiny", administration=administration
    )
    served, got_on = build_server(service, None), activity.doing("serving")
    for is_loading, num_requests, gets_on in ((False, 0, True), (True, 0, False), (False, 1, False)):
        backend.running = set(map(str, range(num_requests)))
        await asyncio.sleep(0.2)
        before = got_on.seconds
        async with administration.lock if is_loading else contextlib.nullcontext():
            await served.on_tick(1)
        assert (got_on.seconds < before) is gets_on
