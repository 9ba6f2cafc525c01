"""The load on the orchestrator: what its stand-ins answer, what it measures with, and a small run of it all."""

import asyncio
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/reverse_text_cpu/model"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return {name: importlib.import_module(name) for name in ("stand_ins", "watching")}


@pytest.fixture
def server_of(modules):
    def build(latency_s=0.0, spread=0.5):
        return modules["stand_ins"].LatencyServer(MODEL, latency_s=latency_s, spread=spread, num_tokens=6, seed=3)

    return build


async def ask(server, path, body=b"", headers=()):
    """Status and decoded answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await server({"type": "http", "path": path, "headers": list(headers)}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_an_answer_is_whole_and_tells_the_weights_before_and_after_its_latency(server_of):
    server = server_of(latency_s=0.05, spread=0.0)
    asked = asyncio.create_task(ask(server, "/inference/v1/generate", b'{"token_ids": [1]}'))
    await asyncio.sleep(0)
    assert server.num_running == 1
    server._version = 4
    status, answer = await asked
    (choice,) = answer["choices"]
    assert status == 200
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 6
    assert choice["token_ids"][-1] == 2
    assert all(token["logprob"] <= 0 for token in choice["logprobs"]["content"])
    assert answer["versions"] == [[[0, 3], [4, 3]]]
    assert (server.num_running, server.num_asked, server.num_answered) == (0, 1, 1)
    assert 0.05 <= server.running_s < 5


async def test_older_weights_than_asked_for_are_refused_and_unknown_routes_too(server_of):
    server = server_of()
    header = [(b"x-prime-min-version", b"1")]
    assert (await ask(server, "/inference/v1/generate", b"{}", header))[0] == 503
    server._version = 1
    assert (await ask(server, "/inference/v1/generate", b"{}", header))[0] == 200
    assert (await ask(server, "/somewhere"))[0] == 404


def test_latencies_have_the_median_and_the_spread_that_were_asked_for(server_of):
    server = server_of(latency_s=5.0, spread=0.5)
    logs = [math.log(server.draw_latency()) for _ in range(4000)]
    assert math.exp(statistics.fmean(logs)) == pytest.approx(5.0, rel=0.05)
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.05)


def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_loop_that_is_blocked_is_late_by_that_much_and_what_blocks_it_is_seen(modules):
    watching = modules["watching"]
    beats = watching.Beats()
    with watching.Sampler(beats) as sampler:
        beating = asyncio.create_task(beats.run())
        await asyncio.sleep(0.03)
        compute(0.3)
        await asyncio.sleep(0.03)
        beating.cancel()
    assert 0.25 < beats.lags.percentile(100) < 60
    assert 0.29 < beats.busy.percentile(100) < 5
    for counts, least in ((sampler.places, 0.2), (sampler.late, 0.1)):
        place, seconds = counts.most_common(1)[0]
        assert place.endswith("test_orchestrator_benchmark:compute")
        assert least < seconds < 5
    assert sampler.groups.most_common(1)[0][0] == "test_orchestrator_benchmark"


async def test_time_counts_for_the_package_that_python_s_own_modules_work_for(modules):
    watching = modules["watching"]
    frames = []
    json.dumps({1}, default=lambda _: frames.append(sys._getframe()))
    assert frames[0].f_back.f_code.co_filename.endswith("encoder.py")
    assert watching.group_of(frames[0].f_back) == "test_orchestrator_benchmark"
    loop = frames[0]
    while loop.f_code.co_name != "_run_once":
        loop = loop.f_back
    assert watching.group_of(loop) == "asyncio"
    assert watching.where(frames[0]).endswith("test_orchestrator_benchmark:" + frames[0].f_code.co_qualname)


def test_a_profile_of_a_process_is_in_its_file_while_it_runs(modules, tmp_path):
    code = "import pathlib, sys, watching\nwatching.WRITE_INTERVAL_S = 0.2\n"
    code += "watching.SamplerToFile(pathlib.Path(sys.argv[1])).start()\nwhile True:\n    sum(range(1000))\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment) as process:
        until = time.monotonic() + 60
        seen = {}
        while not sum(seen.values()) > 0.1 and time.monotonic() < until:
            time.sleep(0.05)
            if (path := tmp_path / f"{process.pid}.json").exists():
                seen = json.loads(path.read_text())["places"]
        process.kill()
    assert seen["<string>:<module>"] > 0.1


def test_trend_and_percentiles_are_those_of_the_definition(modules):
    watching = modules["watching"]
    assert watching.trend([(0, 1), (1, 3), (2, 5)]) == (2, 0)
    means = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.5]
    points = [(second, means[second // 60] + (-1) ** second) for second in range(600)]
    (slope, _), covariance = np.polyfit([60 * block + 29.5 for block in range(10)], means, 1, cov=True)
    assert watching.trend(points) == pytest.approx((slope, math.sqrt(covariance[0][0])))
    durations = watching.Durations()
    for hundredth in range(1, 101):
        durations.note(hundredth / 100)
    assert [durations.percentile(at) for at in (50, 99, 100)] == pytest.approx([0.5, 0.99, 1], abs=1e-4)
    assert durations.total_s == pytest.approx(50.5)
    assert math.isnan(watching.Durations().percentile(99))


def test_what_a_process_uses_is_its_own(modules):
    usage = modules["watching"].usage
    before = usage(os.getpid())
    hoard = bytearray(os.urandom(1 << 20)) * 64
    compute(0.2)
    after = usage(os.getpid())
    assert 0.15 < after.cpu_s - before.cpu_s < 5
    ticks = 2 / modules["watching"].TICKS_PER_S  # time in and outside the kernel, each counted in whole ticks
    assert 0.15 < after.main_s - before.main_s <= after.cpu_s - before.cpu_s + ticks
    assert after.kernel_s - before.kernel_s < after.cpu_s - before.cpu_s
    assert after.rss_mib - before.rss_mib > len(hoard) / 2**20 / 2
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid in modules["watching"].children(os.getpid())
    child.communicate(b"\n")
    assert usage(child.pid) is None


def test_the_time_of_threads_is_told_by_their_names(modules):
    done = threading.Event()

    def work():
        compute(0.2)
        done.set()
        wait.wait(60)

    wait = threading.Event()
    before = modules["watching"].threads()
    thread = threading.Thread(target=work, name="works_3")
    thread.start()
    done.wait(60)
    seconds = modules["watching"].threads() - before
    wait.set()
    thread.join()
    assert 0.15 < seconds["works"] < 5


@pytest.mark.slow
def test_a_small_load_runs_through_and_is_reported():
    argv = ["--rollouts", "16", "--turns", "3", "--latency", "0.05", "--workers", "1", "--minutes", "0.3", "--profile"]
    done = subprocess.run(
        [sys.executable, "benchmarks/orchestrator.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for words in (
        "rollouts/s shipped",
        "event loop late",
        "MiB/min",
        "CPU ms per turn",
        "generations",
        "the workers' main",
    ):
        assert words in done.stdout
