"""The `inference` command with a tiny real model: the stock client, new weights under load, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.models.hf import hf_tensors, load_decoder
from prime_rl.transport.weights import publish_weights

EOS = "<|im_end|>"
KEY = "s3cret"
HI = [{"role": "user", "content": "reverse this"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant: "
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3 of 30,000 parameters without weights (so they are initialised), and a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("model")
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([EOS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(QWEN3))
    return directory


@dataclass
class Server:
    """An `inference` command; what it prints goes to a file."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def ended(self, timeout: float) -> str:
        """All that it printed, once it has ended."""
        self.process.wait(timeout)
        return self.log.read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts an `inference` command with flags; all are ended at the end."""
    started: list[Server] = []

    def run(port: int, *flags: str) -> Server:
        directory = tmp_path_factory.mktemp("run")
        words = ["--model.name", str(model), "--server.port", str(port), "--device", "cpu"]
        words += ["--output-dir", str(directory / "outputs"), *flags]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        environment["OMP_NUM_THREADS"] = "1"  # the model is tiny: threads would only wait for each other
        log = directory / "printed"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.cli", "inference", *words],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append(Server(process, f"http://127.0.0.1:{port}", log))
        return started[-1]

    yield run
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def serving(start: Callable[..., Server]) -> Server:
    """A server that answers."""
    running = start(free_port(), "--api-key", KEY, "--server.host", "127.0.0.1")
    deadline = time.monotonic() + 120
    with httpx.Client(base_url=running.url, verify=False) as client:
        while True:
            assert running.process.poll() is None, running.log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            try:
                client.get("/health").raise_for_status()
                return running
            except httpx.TransportError:
                time.sleep(0.1)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    """One server for all tests that leave it running."""
    return serving(start)


def http_client(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, verify=False, timeout=60)


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server) as client:
        yield client


@pytest.fixture
def client(server: Server, http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, http_client=http, max_retries=0)


async def await_metric(http: httpx.AsyncClient, name: str, value: float) -> None:
    """Until the server counts this much."""
    async with asyncio.timeout(20):
        while await metric(http, name) != value:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0.02)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


def new_weights(model: Path, root: Path, step: int) -> Path:
    decoder = load_decoder(str(model), device="cpu", dtype=torch.float32, seed=1000 + step)
    return publish_weights(hf_tensors(decoder), step=step, weights_dir=root, assets=model)


async def greedy(client: AsyncOpenAI, model: Path) -> list[int]:
    answer = await client.chat.completions.create(
        model=str(model), messages=HI, temperature=0, max_tokens=16, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].token_ids


async def test_new_weights_come_in_between_the_tokens_of_running_requests(client, http, model, tmp_path):
    before = await greedy(client, model)
    assert await greedy(client, model) == before
    old = (await http.get("/health")).json()["version"]

    async def stream(seed: int, has_begun: asyncio.Event) -> list[int]:
        versions: list[int] = []
        chunks = await client.chat.completions.create(
            model=str(model), messages=HI, stream=True, max_tokens=200, seed=seed, extra_body={"ignore_eos": True}
        )
        async for chunk in chunks:
            versions += getattr(chunk.choices[0], "versions", [])
            if versions:
                has_begun.set()
        return versions

    directory = new_weights(model, tmp_path, 1)
    has_begun = asyncio.Event()
    # Enough of them that the server is far from done when the first token has come through a busy machine to us.
    streams = [asyncio.create_task(stream(seed, has_begun)) for seed in range(24)]
    await has_begun.wait()
    answer = await http.post("/update_weights", json={"weight_dir": str(directory), "version": 1})
    assert answer.status_code == 200, answer.text
    all_versions = await asyncio.gather(*streams)
    for versions in all_versions:
        assert len(versions) == 200
        assert versions == sorted(versions)
        assert set(versions) <= {old, 1}
    assert {old, 1} in map(set, all_versions)
    assert (await http.get("/health")).json() == {"status": "ok", "version": 1}
    assert await greedy(client, model) != before


async def test_weights_that_were_damaged_are_refused_and_the_old_ones_serve_on(client, http, model, tmp_path):
    before = await greedy(client, model)
    health = (await http.get("/health")).json()
    directory = new_weights(model, tmp_path, 2)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    answer = await http.post("/update_weights", json={"weight_dir": str(directory), "version": 2})
    assert answer.status_code == 400
    assert "model.safetensors" in answer.json()["error"]["message"]
    assert (await http.get("/health")).json() == health
    assert await greedy(client, model) == before


async def test_all_routes_serve_the_same_model(client, http, model):
    (card,) = (await client.models.list()).data
    assert (card.id, card.max_model_len) == (str(model), 1024)
    prompt = (await http.post("/tokenize", json={"messages": HI})).json()["tokens"]
    sampling = {"temperature": 0, "max_tokens": 16, "logprobs": 1}
    generated = (
        await http.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
    ).json()
    completed = await client.completions.create(
        model=str(model), prompt=prompt, temperature=0, max_tokens=16, extra_body={"return_token_ids": True}
    )
    ids = await greedy(client, model)
    assert generated["choices"][0]["token_ids"] == completed.choices[0].token_ids == ids
    logprobs = [entry["logprob"] for entry in generated["choices"][0]["logprobs"]["content"]]
    assert len(logprobs) == len(ids)
    assert all(-20 < value < 0 for value in logprobs)


async def test_a_client_that_goes_away_frees_its_blocks(http, model):
    before = await metric(http, "vllm:generation_tokens_total")
    body = {"prompt": "hi", "stream": True, "max_tokens": 1000, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await await_metric(http, "vllm:num_requests_running", 0)
    assert await metric(http, "vllm:kv_cache_usage_perc") < 0.01
    assert await metric(http, "vllm:generation_tokens_total") < before + 1000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_being_told_to_stop_ends_it_cleanly_and_soon(start, number):
    server = serving(start)
    async with http_client(server) as http:
        await http.post("/pause")
        body = {"prompt": "hi", "stream": True, "max_tokens": 500}
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await await_metric(http, "vllm:num_requests_waiting", 1)
        started = time.monotonic()
        server.process.send_signal(number)
        output = await asyncio.to_thread(server.ended, timeout=20)
        assert server.process.returncode == 0, output
        assert time.monotonic() - started < 3
        assert "Traceback" not in output
        assert '"code":503' in (await request).text


async def test_an_engine_that_fails_ends_the_server_with_its_reason(start, model, tmp_path):
    server = serving(start)
    decoder = load_decoder(str(model), device="cpu", dtype=torch.float32, seed=0)
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in hf_tensors(decoder)}
    directory = publish_weights(tensors.items(), step=1, weights_dir=tmp_path, assets=model)
    async with http_client(server) as http:
        await http.post("/update_weights", json={"weight_dir": str(directory), "version": 1})
        answer = await http.post("/v1/completions", json={"prompt": "hi"})
        output = await asyncio.to_thread(server.ended, timeout=20)
    assert answer.status_code == 503
    assert "not finite" in answer.json()["error"]["message"]
    assert server.process.returncode == 1
    assert "inference: the inference engine failed: FloatingPointError: the model's logits are not finite" in output


def test_a_port_that_is_taken_is_one_clear_sentence(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(port)
        output = server.ended(timeout=60)
    assert server.process.returncode == 1
    assert f"port {port} on 127.0.0.1 is already in use" in output
    assert "Traceback" not in output


def test_serving_the_network_without_a_key_is_refused(start):
    server = start(free_port(), "--server.host", "0.0.0.0")
    output = server.ended(timeout=60)
    assert server.process.returncode == 1
    assert "an API key is needed" in output
