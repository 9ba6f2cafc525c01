"""The orchestrator's process against the real server with a small model; a scripted trainer publishes weights."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest
import torch
from verifiers.legacy.utils.save_utils import load_outputs

from prime_rl.models.hf import hf_tensors, load_decoder
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.weights import publish_weights
from tests.doubles.inference import save_tokenizer

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 2,
}

ORCHESTRATOR = """
    import sys
    from prime_rl.cli import orchestrator
    orchestrator(sys.argv[1:])
    print("heavy:", *sorted({"torch", "transformers", "verifiers", "datasets"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3 of 25,000 parameters, initialised by the server, and a tokenizer of characters."""
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


class Processes:
    """Subprocesses of a test, their output in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.directory / f"{name}.out").open("ab") as out:
            process = subprocess.Popen([sys.executable, *words], env=environment, stdout=out, stderr=out)
        self.started.append(process)
        return process

    def output(self, name: str) -> str:
        return (self.directory / f"{name}.out").read_text()


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    for process in processes.started:
        process.kill()
        process.wait()


@pytest.fixture
def serve(processes, model, free_port):
    def start():
        words = ["--model.name", str(model), "--server.port", str(free_port), "--device", "cpu"]
        return processes.start("inference", "-m", "prime_rl.cli", "inference", *words)

    return start


@pytest.fixture
def orchestrate(processes, model, free_port, tmp_path):
    def start(**flags):
        flags = {"max-steps": 6, "batch-size": 8, "rollouts-per-example": 4, "seq-len": 256} | flags
        words = ["--model.name", str(model), "--client.base-url", f"http://127.0.0.1:{free_port}/v1"]
        words += ["--output-dir", str(tmp_path / "run")]
        words += ["--sampling.max-tokens", "12"]
        words += ["--env", json.dumps([{"id": "reverse-text", "args": {"max_words": 3, "num_examples": 20}}])]
        for name, value in flags.items():
            words += [f"--{name}", str(value)]
        return processes.start("orchestrator", "-c", textwrap.dedent(ORCHESTRATOR), *words)

    return start


def train(paths, model, process, *, steps, after_step=lambda step: None):
    """Take batch after batch, and publish other weights for each. Returns the batches."""
    reader = BatchReader(paths.rollouts)
    batches = []
    for step in range(steps):
        deadline = time.monotonic() + 90
        while not (step_dir(paths.rollouts, step) / "STABLE").exists():
            assert process.poll() is None, "the orchestrator ended"
            assert time.monotonic() < deadline, f"no batch {step}"
            time.sleep(0.02)
        batches.append(reader.read(step, 1))
        decoder = load_decoder(str(model), device="cpu", dtype=torch.float32, seed=step)
        publish_weights(hf_tensors(decoder), step=step + 1, weights_dir=paths.weights, assets=model)
        after_step(step)
    return batches


def test_at_level_zero_every_token_of_a_batch_is_of_its_own_weights_and_the_process_holds_no_torch(
    processes, serve, orchestrate, model, tmp_path
):
    serve()
    orchestrator = orchestrate(**{"max-async-level": 0})
    paths = RunPaths(tmp_path / "run")
    batches = train(paths, model, orchestrator, steps=6)
    assert orchestrator.wait(30) == 0, processes.output("orchestrator")
    assert [(batch.min_version, batch.max_version) for batch in batches] == [(step, step) for step in range(6)]
    rows = read_metrics(paths.metrics("orchestrator"))
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["off_policy_gap/max"] == 0 for row in rows)
    # An untrained model ends at once now and then, which is no error of the system; nothing else may fail.
    own = {"errors/rate", "errors/empty_completion"}
    assert {
        name: n for row in rows for name, n in row.items() if name.startswith("errors/") and n and name not in own
    } == {}
    assert all(1 <= row["completion_len/min"] <= row["completion_len/max"] <= 12 for row in rows)
    assert all(0 <= row["event_loop_lag/mean"] <= row["event_loop_lag/max"] < 10 for row in rows)
    assert sum(row["rollouts/reverse-text/used"] for row in rows) == 6 * 8
    output = processes.output("orchestrator")
    assert "heavy:\n" in output, output[-500:]
    check_traces(paths, batches, num_dispatched=int(re.findall(r"6 batches; (\d+) rollouts: ", output)[-1]))


def check_traces(paths, batches, *, num_dispatched):
    """Every rollout that was dispatched has a row, and those that were used are what the batches hold."""
    num_rows = 0
    for batch in batches:
        traces = load_outputs(step_dir(paths.traces, batch.step) / "reverse-text")
        num_rows += len(traces)
        used = [trace for trace in traces if trace["end"] == {"kind": "used", "why": ""}]
        samples = [sample for trace in used for sample in trace["tokens"]]
        assert sum(len(sample["ids"]) for sample in samples) == batch.num_tokens
        assert sum(len(sample["logprobs"]) for sample in samples) == batch.num_loss_tokens
        assert {version for sample in samples for version in sample["versions"]} == {batch.step}
        assert sum(trace["advantage"] for trace in used) == pytest.approx(0, abs=1e-6)
        assert all(trace["completion"][-1]["role"] == "assistant" for trace in used)
    assert num_rows == num_dispatched


def test_a_server_that_is_killed_and_started_again_gets_its_weights_back_and_the_run_stays_within_the_bound(
    processes, serve, orchestrate, model, free_port, tmp_path
):
    server = serve()
    orchestrator = orchestrate(**{"max-async-level": 2, "max-off-policy-steps": 1})
    paths = RunPaths(tmp_path / "run")

    def restart(step):
        if step == 2:
            server.kill()
            server.wait()
            serve()

    batches = train(paths, model, orchestrator, steps=6, after_step=restart)
    assert orchestrator.wait(30) == 0, processes.output("orchestrator")
    gaps = [batch.step - batch.min_version for batch in batches]
    assert max(gaps) <= 3
    assert gaps == [row["off_policy_gap/max"] for row in read_metrics(paths.metrics("orchestrator"))]
    assert httpx.get(f"http://127.0.0.1:{free_port}/health").json()["version"] >= 3
    told = processes.output("orchestrator")
    assert told.index(" is lost: ") < told.index(" is up with weights ")
