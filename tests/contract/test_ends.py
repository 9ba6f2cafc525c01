"""How a server ends: told to stop, with a failed engine, or before it has begun.

These come last (`conftest.py` sorts them): they end the servers of all other tests.
"""

import asyncio
import os
import signal
import socket
import time

import psutil
import pytest
import torch

from tests.contract.model import make_tokenizer, weights
from tests.contract.servers import Server, free_port, start
from tests.contract.weights import Publisher

STOP_S = {"embedded": 3.0, "vllm": 15.0}
"""vLLM gives its engine's process some seconds."""


@pytest.fixture
def starting(kind, model, tmp_path):
    """Starts servers of their own; whatever is left of them is ended."""
    started: list[Server] = []

    def begin(**keys) -> Server:
        started.append(start(kind, model, tmp_path / str(len(started)), **keys))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def test_a_port_that_is_taken_is_one_clear_sentence(starting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = starting(server={"host": "127.0.0.1", "port": port})
        printed = server.ended(timeout=120)
    assert server.process.returncode == 1
    assert f"port {port} on 127.0.0.1 is already in use" in printed
    assert "Traceback" not in printed


def test_serving_the_network_without_a_key_is_refused(starting):
    server = starting(server={"host": "0.0.0.0", "port": free_port()})
    printed = server.ended(timeout=120)
    assert server.process.returncode == 1
    assert "an API key is needed" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT], ids=["terminate", "ctrl-c"])
def test_being_told_to_stop_while_it_loads_ends_it(starting, told):
    server = starting()
    time.sleep(4.0)
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(told)
    printed = server.ended(timeout=30)
    assert "Traceback" not in printed
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


async def test_being_told_to_stop_answers_who_waits_and_leaves_nothing_behind(api, server, kind):
    family = psutil.Process(server.process.pid).children(recursive=True)
    await api.post("/pause")
    waiting = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 500}))
    await asyncio.sleep(0.5)
    before = len(server.printed)  # vLLM logs what malformed requests did with a traceback
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    printed = await asyncio.to_thread(server.ended)
    assert time.monotonic() - began < STOP_S[kind.name]
    assert server.process.returncode == 0, printed[-3000:]
    assert "Traceback" not in printed[before:]
    answer = await waiting
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == 503
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


async def test_an_engine_that_fails_ends_the_server_with_its_reason(second_api, second, model, tmp_path, kind):
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(make_tokenizer()).items()}
    directory = Publisher(model, tmp_path).publish(1, tensors)

    async def ask_on(number):
        while True:
            await second_api.generate([number], max_tokens=900, ignore_eos=True, n=8)

    waiting = [asyncio.create_task(ask_on(number)) for number in range(3)]
    await second_api.await_metric("vllm:num_requests_running", lambda value: value > 0)
    if kind.name == "vllm":  # its engine is a process of its own
        (engine,) = [p for p in psutil.Process(second.process.pid).children() if "EngineCore" in " ".join(p.cmdline())]
        os.kill(engine.pid, signal.SIGKILL)
    else:
        await second_api.http.post("/update_weights", json={"weight_dir": str(directory), "version": 1})
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(error, AssertionError) and "503" in str(error) for error in errors), errors
    printed = await asyncio.to_thread(second.ended)
    assert second.process.returncode == 1
    reasons = [line for line in printed.splitlines() if line.startswith("inference: ")]
    assert len(reasons) == 1
    assert "engine failed" in reasons[0]
