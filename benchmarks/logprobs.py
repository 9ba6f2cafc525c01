"""Logprobs of the server against those of the trainer, on the same tokens under the same weights.

    python benchmarks/logprobs.py --model 3.3m --backends embedded vllm --vllm-python /path/to/python-with-vllm
    python benchmarks/logprobs.py --model 0.6b --backends embedded vllm --trainer-dtypes bfloat16 float32

The server samples completions over HTTP and reports a logprob for every token; then the trainer's own forward pass,
over packed rows as in training, computes them anew. Printed: mean and largest absolute difference, and the mismatch KL
that the trainer reports (mean of r - log r - 1, with r the ratio of the two probabilities).
"""

import argparse
import asyncio
import json
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from http_load import Answer, Workload, check, load
from inference import machine, num_gpus
from models import DTYPES, SHAPES, make_model
from sides import Server, Setting

from prime_rl.monitors.tables import aligned

TRAINER_TIMEOUT_S = 400.0
ROW_TOKENS = 8192


def sample(backend: str, setting: Setting) -> list[dict[str, Any]]:
    """Prompts, completions and the logprobs that the server reports of them."""
    work, server = setting.work, Server(backend, setting)
    try:
        prompts = work.prompts(0)
        answers = asyncio.run(_ask_all(server, work, prompts))
    finally:
        server.close()
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        choice = msgspec.json.decode(answer, type=Answer).choices[0]
        assert choice.logprobs is not None
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        rows.append({"prompt": prompt, "completion": choice.token_ids, "logprobs": logprobs})
    return rows


async def _ask_all(server: Server, work: Workload, prompts: list[list[int]]) -> list[bytes]:
    async def ask(prompt: list[int]) -> bytes:
        responses = await load(server.url, server.model, work, [prompt], 1)
        check(responses, work)
        return responses[0].body

    return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))


def recompute(spec: dict[str, Any]) -> dict[str, float]:
    """What the trainer says of the completions in `spec["file"]`; in a process of its own."""
    import torch  # noqa: PLC0415 (the server's side needs none)

    from prime_rl.data.packing import build_batch  # noqa: PLC0415
    from prime_rl.models.hf import load_decoder  # noqa: PLC0415
    from prime_rl.trainer.model.precision import ComputeModel  # noqa: PLC0415
    from prime_rl.trainer.model.scoring import Scorer  # noqa: PLC0415
    from prime_rl.trainer.streams import LossOutput, TokenStreams  # noqa: PLC0415
    from prime_rl.trainer.trainer import accumulate_gradients  # noqa: PLC0415

    samples = [_training_sample(index, row) for index, row in enumerate(json.loads(Path(spec["file"]).read_text()))]
    differences: list[torch.Tensor] = []

    def loss(streams: TokenStreams) -> LossOutput:
        differences.append((streams.logprobs_N - streams.inference_logprobs_N).detach().double().cpu())
        return LossOutput(sums={"rl": streams.logprobs_N.sum()}, metrics_N={})

    master = load_decoder(spec["model_dir"], device=torch.device(spec["device"]), dtype=torch.float32)
    batch = build_batch(samples, step=0, seq_len=ROW_TOKENS)
    accumulate_gradients(ComputeModel(Scorer(master), getattr(torch, spec["dtype"])), loss, batch)
    log_ratio = torch.cat(differences)
    assert len(log_ratio) == sum(sample.num_loss_tokens for sample in samples)
    return {
        "tokens": float(len(log_ratio)),
        "mean": log_ratio.abs().mean().item(),
        "max": log_ratio.abs().max().item(),
        "kl": (log_ratio.expm1() - log_ratio).mean().item(),
    }


def _training_sample(index: int, row: dict[str, Any]) -> Any:
    import numpy as np  # noqa: PLC0415

    from prime_rl.data.samples import NOT_SAMPLED, TrainingSample  # noqa: PLC0415

    prompt, completion = row["prompt"], row["completion"]
    in_loss = np.arange(len(prompt) + len(completion)) >= len(prompt)
    logprobs = np.zeros(len(in_loss), np.float32)
    logprobs[in_loss] = row["logprobs"]
    return TrainingSample(
        token_ids=np.asarray(prompt + completion, np.int32),
        loss_mask=in_loss,
        logprobs=logprobs,
        versions=np.where(in_loss, 0, NOT_SAMPLED).astype(np.int32),
        temperature=1.0,
        advantage=0.0,
        reward=0.0,
        env_name="benchmark",
        rollout_id=str(index),
    )


def in_process(spec: dict[str, Any]) -> dict[str, float]:
    """`recompute` in a process that ends and gives back its memory."""
    words = [sys.executable, str(Path(__file__).resolve()), "--recompute", json.dumps(spec)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=TRAINER_TIMEOUT_S)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert all(math.isfinite(value) for value in result.values()), result
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="3.3m")
    parser.add_argument("--weights", type=Path, help="a model directory to take instead, such as a trained one")
    parser.add_argument("--vocab", type=int, default=38, help="tokens of --weights that prompts are made of")
    parser.add_argument("--backends", nargs="+", choices=["embedded", "vllm"], default=["embedded"])
    parser.add_argument("--dtype", choices=DTYPES, help="of the server; default: float32 on CPU, bfloat16 on a GPU")
    parser.add_argument("--trainer-dtypes", nargs="+", choices=DTYPES, help="default: the server's")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--recompute", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.recompute:
        print(json.dumps(recompute(args.recompute)))
        return
    device = "cuda" if num_gpus() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    lines = [["server", "trainer", "tokens", "mean |diff|", "max |diff|", "mismatch KL"]]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model_dir = args.weights or directory / "model"
        if args.weights is None:
            make_model(args.model, model_dir, dtype)
        logs = args.logs or directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        vocab = args.vocab if args.weights else SHAPES[args.model].vocab
        work = Workload(
            requests=args.requests,
            concurrency=args.requests,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            vocab=vocab,
        )
        setting = Setting(
            model_dir=model_dir,
            dtype=dtype,
            work=work,
            device=device,
            threads=2,
            gpu_memory_utilization=0.4,
            num_clients=1,
            vllm_python=args.vllm_python,
            enforce_eager=device == "cpu",
            logs=logs,
        )
        for backend in args.backends:
            file = directory / f"{backend}.json"
            file.write_text(json.dumps(sample(backend, setting)))
            for trainer_dtype in args.trainer_dtypes or [dtype]:
                spec = {"file": str(file), "model_dir": str(model_dir), "device": device, "dtype": trainer_dtype}
                result = in_process(spec)
                shown = [f"{result[key]:.2e}" for key in ("mean", "max", "kl")]
                lines.append([f"{backend} {dtype}", trainer_dtype, f"{result['tokens']:.0f}", *shown])
                print(*lines[-1], file=sys.stderr, flush=True)
    print(f"\n{aligned(lines)}")


if __name__ == "__main__":
    main()
