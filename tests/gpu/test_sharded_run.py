"""`rl` with its trainer sharded over two GPUs, which meet over NCCL; the server shares the first one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(280),
]

ROOT = Path(__file__).parents[2]
MODEL = "examples/reverse_text_cpu/model"


def test_rl_trains_over_two_gpus_and_serves_what_they_publish(tmp_path, free_port):
    """At level 0 every token is sampled by the weights it trains, so logprobs agree only if these arrived whole."""
    argv = (
        *("rl", "--model.name", MODEL, "--output-dir", str(tmp_path), "--inference.server.port", str(free_port)),
        *("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0,1", "--max-steps", "6", "--max-async-level", "0"),
        *("--inference.backend", "embedded", "--inference.model.dtype", "float32", "--seq-len", "128"),
        *("--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4"),
        *("--orchestrator.sampling.max-tokens", "8", "--trainer.optim.lr", "1e-3"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "prime_rl.cli", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    paths = RunPaths(tmp_path)
    log = paths.log("trainer")
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    rows = read_metrics(paths.metrics("trainer"))
    assert [row["step"] for row in rows] == list(range(6))
    assert max(row["mismatch_kl/mean"] for row in rows) < 1e-6
    assert "on 2 x NVIDIA" in log.read_text()
