"""Weights on GPUs: checksums as on the CPU, and a trainer on one that reaches a vLLM server on another over NCCL."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.engine.build import build_engine
from prime_rl.models.hf import hf_tensors, load_decoder, model_tensors
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.publishers import WeightPublisher
from prime_rl.trainer.publish.retention import Retention
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.broadcasts import fall_back, ready_file
from prime_rl.transport.checksum import checksum
from prime_rl.transport.manifest import MARKER, read_manifest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
START_S = 240.0
MEETING_PORT = 29541


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_cpu_and_gpu_agree_on_checksums(dtype):
    for size in (0, 1, 5, 2**24 + 3, 2**26 + 1):
        tensor = torch.randint(0, 255, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
        assert checksum(tensor) == checksum(tensor.cuda()), size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150M parameters in bfloat16."""
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "benchmarks/models.py", "150m", str(directory)], cwd=ROOT, check=True, timeout=200)
    return directory


async def test_every_parameter_changed_by_its_own_amount_reaches_the_embedded_engine(tmp_path, model):
    engine = build_engine(
        InferenceConfig.model_validate({"model": {"name": str(model)}, "device": "cuda", "kv_cache_memory_gb": 1})
    )
    administration = EmbeddedAdministration(engine, first=lambda: model_tensors(model, 0))
    original = await administration.tensors()
    trainer = load_decoder(str(model), device="cuda")
    stored = StoredTensors(lambda: dict(hf_tensors(trainer)), torch.bfloat16, ALONE)
    retention = Retention(root=tmp_path / "weights", max_steps=3, interval=None, keep_last=9)
    files = WeightPublisher(
        tensors=stored.gathering, writer=BackgroundWriter(), retention=retention, assets=model, tokenizer=model
    )
    for step in (1, 2, 3):
        with torch.no_grad():
            for number, parameter in enumerate(trainer.parameters(), 1):
                parameter += number / 1024
        torch.cuda.synchronize()
        started = time.monotonic()
        files.publish(step)
        files.finish()
        published = time.monotonic()
        directory = tmp_path / "weights" / f"step_{step}"
        await administration.update(directory, step)
        print(f"embedded step_{step}: publish {published - started:.3f} s, update {time.monotonic() - published:.3f} s")
        announced = read_manifest(directory).weights
        assert await administration.tensors() == {name: entry.checksum for name, entry in announced.tensors.items()}
    await administration.reload()
    assert await administration.tensors() == original
    await engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="trainer and server need a GPU each")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start_trainer", ["whole", "in slices"])
def test_every_parameter_changed_by_its_own_amount_reaches_vllm_over_nccl_and_through_files(
    tmp_path, model, free_port, start_trainer
):
    """Steps 1 and 2 are broadcast, 3 falls back to files that are soon removed, 4 is the last, which stays."""
    pytest.importorskip("vllm")
    trainer = {"whole": trainer_of_one, "in slices": trainer_of_two}[start_trainer]
    (tmp_path / "broadcasts").mkdir()
    meeting = {"host": "127.0.0.1", "port": MEETING_PORT, "rank_offset": 1, "world_size": 2, "timeout": START_S}
    with server(model, tmp_path, free_port) as http, trainer(model, tmp_path) as process:
        assert http.post("/init_weight_transfer", json=meeting).json() == {"status": "connected"}
        with load(http, model) as answers:
            for step in (1, 2, 3, 4):
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
                directory = announced(tmp_path, step, "broadcasts" if step < 3 else "weights")
                seconds = take(http, process, tmp_path / "broadcasts", directory, step, model)
                print(f"{directory.parent.name}/step_{step}: {seconds}")
                assert_arrived(http, directory, step)
                if step == 2:
                    fall_back(tmp_path / "broadcasts", "the test wants files")
    assert all(answer.status_code == httpx.codes.OK for answer in answers)
    runs = [answer.json()["versions"][0] for answer in answers]
    assert all([version for version, _ in run] == sorted({version for version, _ in run}) for run in runs)
    assert all(sum(count for _, count in run) == 400 for run in runs)
    assert {version for run in runs for version, _ in run} >= {1, 2, 3}


def announced(root: Path, step: int, where: str) -> Path:
    """Wait for the trainer's directory of a step."""
    directory = root / where / f"step_{step}"
    end = time.monotonic() + START_S
    while not (directory / MARKER).exists():
        assert time.monotonic() < end, f"no {directory}"
        time.sleep(0.002)
    return directory


def take(
    http: httpx.Client, process: "subprocess.Popen[str]", broadcasts: Path, directory: Path, step: int, model: Path
) -> dict[str, float]:
    """What the orchestrator does with a new version; seconds from the trainer's publish."""
    update = {"weight_dir": str(directory), "version": step}
    if directory.parent == broadcasts:
        assert http.post("/pause").status_code == httpx.codes.OK
        ready_file(broadcasts, step).touch()
    answer = http.post("/update_weights", json=update)
    assert answer.json() == {"version": step, "digest": read_manifest(directory).weights.digest}
    if directory.parent == broadcasts:
        assert http.post("/resume").status_code == httpx.codes.OK
    served = time.monotonic()
    first = http.post("/inference/v1/generate", json=request(model, 1)).json()
    token = time.monotonic()
    assert first["versions"] == [[[step, 1]]]
    started, published = told(process)
    return {"publish": published - started, "served": served - started, "first token": token - started}


def assert_arrived(http: httpx.Client, directory: Path, step: int) -> None:
    expected = {name: entry.checksum for name, entry in read_manifest(directory).weights.tensors.items()}
    found = http.get("/weights").json()
    assert found["version"] == step
    assert found["tensors"] == expected
    assert len(expected) > 190


def told(process: "subprocess.Popen[str]") -> tuple[float, float]:
    for line in process.stdout:
        if line.startswith("{"):
            times = json.loads(line)
            return times["started"], times["ended"]
    raise AssertionError(f"the trainer ended with {process.wait(60)}")


def request(model: Path, new_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 0}
    return {"model": str(model), "token_ids": [1, 2, 3, 4], "sampling_params": sampling}


@contextmanager
def load(http: httpx.Client, model: Path) -> Iterator[list[httpx.Response]]:
    """Requests under way all the time; their answers at the end."""
    answers: list[httpx.Response] = []
    running = [True]

    def ask() -> None:
        while running[0]:
            answers.append(http.post("/inference/v1/generate", json=request(model, 400)))

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask) for _ in range(16)]
        try:
            yield answers
        finally:
            running[0] = False
            for one in asking:
                one.result(START_S)


@contextmanager
def server(model: Path, root: Path, port: int) -> Iterator[httpx.Client]:
    config = root / "inference.toml"
    config.write_text(
        f'backend = "vllm"\noutput_dir = "{root}"\ngpu_memory_utilization = 0.4\n'
        f'[server]\nport = {port}\n[model]\nname = "{model}"\ndtype = "bfloat16"\nmax_model_len = 1024\n',
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "prime_rl.cli", "inference", "@", str(config)]
    log = root / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(words, cwd=ROOT, env=on_gpu(0), stdout=out, stderr=subprocess.STDOUT)
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S, limits=limits) as http:
        try:
            wait_until_healthy(http, process, log)
            yield http
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def wait_until_healthy(http: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if http.get("/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < end, log.read_text()[-6000:]
        time.sleep(0.2)


def spec_of(model: Path, root: Path) -> dict[str, Any]:
    """What a trainer is told."""
    where = {"model_dir": str(model), "output_dir": str(root), "port": MEETING_PORT, "device": "cuda"}
    return where | {"max_steps": 4, "added": 1 / 1024}


@contextmanager
def trainer_of_one(model: Path, root: Path) -> Iterator["subprocess.Popen[str]"]:
    """The benchmark's: publishes each step that it reads."""
    spec = spec_of(model, root) | {"via": "nccl", "dtype": "bfloat16"}
    words = [sys.executable, "benchmarks/update.py", "--publisher", json.dumps(spec)]
    with told_to_publish(words, on_gpu(1)) as process:
        yield process


@contextmanager
def trainer_of_two(model: Path, root: Path) -> Iterator["subprocess.Popen[str]"]:
    """One rank on each GPU; the first, which sends, on the one that the server does not use."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(ROOT / "tests/gpu/sharded_trainer.py"), json.dumps(spec_of(model, root))]
    visible = [on_gpu(index)["CUDA_VISIBLE_DEVICES"] for index in (1, 0)]
    with told_to_publish(words, os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible)}) as process:
        yield process


@contextmanager
def told_to_publish(words: list[str], env: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks then
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def on_gpu(index: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible[index]}
