"""The same commands and the same numbers on one NVIDIA GPU: trainer and embedded engine share it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.backend import GenerationRequest, SamplingParams
from prime_rl.inference.engine.build import build_engine
from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import load_decoder
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "reverse_text_cpu" / "model")


def packed_logprobs(device: str, dtype: torch.dtype, sequences: list[list[int]]) -> torch.Tensor:
    """Logprob of every token but each sequence's first, from one packed forward pass."""
    decoder = load_decoder(MODEL, device=device, dtype=dtype, seed=0)
    ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).to(device)
    with torch.no_grad():
        hidden = decoder(ids, positions, PackedAttention([len(s) for s in sequences], device))
        logprobs = decoder.logits(hidden).float().log_softmax(-1)
    gathered = logprobs[:-1].gather(-1, ids[1:, None])[:, 0].cpu()
    starts = set(torch.tensor([len(s) for s in sequences]).cumsum(0).tolist())
    return gathered[[i for i in range(len(ids) - 1) if i + 1 not in starts]]


def test_the_gpu_gives_the_logprobs_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 38, (length,), generator=generator).tolist() for length in (5, 40, 17, 40)]
    cpu = packed_logprobs("cpu", torch.float32, sequences)
    gpu = packed_logprobs("cuda", torch.float32, sequences)
    assert (cpu - gpu).abs().max() < 1e-4


def test_engine_and_packed_forward_agree_on_the_gpu():
    async def sample() -> tuple[list[int], list[float]]:
        config = InferenceConfig.model_validate({"model": {"name": MODEL, "dtype": "float32"}, "device": "cuda"})
        engine = build_engine(config)
        request = GenerationRequest(
            request_id="a", prompt_ids=[1, 9, 12, 30], sampling=SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        )
        outputs = [output async for piece in engine.generate(request) for output in piece]
        await engine.close()
        return [output.token_id for output in outputs], [output.logprob for output in outputs]

    tokens, logprobs = asyncio.run(sample())
    decoder_seed = InferenceConfig().seed
    decoder = load_decoder(MODEL, device="cuda", dtype=torch.float32, seed=decoder_seed)
    ids = torch.tensor([1, 9, 12, 30, *tokens], device="cuda")
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(len(ids), device="cuda"), PackedAttention([len(ids)], "cuda"))
        expected = decoder.logits(hidden).float().log_softmax(-1)[:-1].gather(-1, ids[1:, None])[3:, 0].cpu()
    assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


@pytest.mark.timeout(280)
def test_sft_and_rl_run_on_one_gpu(tmp_path, free_port):
    def command(*argv: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "prime_rl.cli", *argv], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    example = "examples/reverse_text_cpu"
    command("sft", "@", f"{example}/sft.toml", "--output-dir", str(tmp_path / "sft"))
    (weights,) = (tmp_path / "sft" / "weights").glob("step_*")
    command(
        *("rl", "@", f"{example}/rl.toml", "--model.name", str(weights)),
        *("--inference.server.port", str(free_port), "--output-dir", str(tmp_path / "rl")),
        *("--inference.backend", "embedded", "--inference.model.dtype", "float32"),
    )
    rows = read_metrics(RunPaths(tmp_path / "rl").metrics("trainer"))
    batches = read_metrics(RunPaths(tmp_path / "rl").metrics("orchestrator"))
    rewards = [row["reward/mean"] for row in batches]
    assert rewards[0] <= 0.5
    assert sum(rewards[-3:]) / 3 >= 0.8
    assert "on 1 x NVIDIA" in RunPaths(tmp_path / "rl").log("trainer").read_text()
    # Where the weights that sampled are those that train, the engine equals the trainer.
    on_policy = [row for row, batch in zip(rows, batches, strict=True) if batch["off_policy_gap/max"] == 0]
    assert on_policy
    assert max(row["mismatch_kl/mean"] for row in on_policy) < 1e-6
