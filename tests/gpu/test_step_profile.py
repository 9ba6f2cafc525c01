"""A real trace of a GPU is taken apart as the made-up one of tests/unit/benchmarks is."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from prime_rl.trainer.profile import StepProfile

pytestmark = pytest.mark.gpu


def test_kernels_of_a_step_belong_to_the_parts_that_launched_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    step_profile = importlib.import_module("step_profile")
    device = torch.device("cuda")
    linear = torch.nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16)
    adamw = torch.optim.AdamW(linear.parameters(), fused=True)
    profile = StepProfile(memory_dir=None, trace_dir=tmp_path, device=device, rank=0)
    for step in range(2):
        with profile.step(step):
            x = (
                linear(torch.randn(2048, 1024, device=device, dtype=torch.bfloat16))
                .view(1, 2048, 8, 128)
                .transpose(1, 2)
            )
            F.scaled_dot_product_attention(x, x, x, is_causal=True).float().square().mean().backward()
            adamw.step()
    found = step_profile.read_step(tmp_path / "step_1_rank_0.json.gz")
    assert {"matmul", "attention", "optimizer"} <= found.parts.keys()
    assert found.parts["matmul"].num_kernels >= 2  # forward, and the weight's gradient
    assert 0 < found.busy_s <= found.seconds
