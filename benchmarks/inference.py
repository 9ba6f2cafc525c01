"""Decode speed of the embedded engine on CPU against vLLM, in pairs in turn.

    python benchmarks/inference.py --vllm-python /path/to/python-with-vllm

Both sides serve the same small model with the same prompts through their Python API, warm, on the same number of
threads; each side of a pair runs while the other one is stopped. Figures are output tokens per second; what counts is
the ratio within a pair, since a machine's speed drifts. Without vLLM in reach (`--no-vllm`) only our side runs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
MAX_MODEL_LEN = 384
READY = "READY"


def prompts_of(args: argparse.Namespace, run: int) -> list[list[int]]:
    """Random prompts, new ones each run, so that no prefix cache can help."""
    rng = random.Random(1000 + run)
    return [[rng.randrange(1, MODEL["vocab_size"]) for _ in range(args.prompt_tokens)] for _ in range(args.requests)]


class Ours:
    """The embedded engine through its `Backend`."""

    def __init__(self, args: argparse.Namespace, model_dir: Path, dtype: str) -> None:
        import torch  # noqa: PLC0415 (only the process of this side loads it)

        from prime_rl.config.inference import InferenceConfig  # noqa: PLC0415
        from prime_rl.inference.engine.build import build_engine  # noqa: PLC0415

        torch.set_num_threads(args.threads)
        config = {
            "model": {"name": str(model_dir), "dtype": dtype, "max_model_len": MAX_MODEL_LEN},
            "device": "cpu",
            "max_num_seqs": args.concurrency,
            "kv_cache_memory_gb": 2.0,
        }
        self.args = args
        self.engine = build_engine(InferenceConfig.model_validate(config))

    def run(self, prompts: list[list[int]]) -> int:
        return asyncio.run(self._run(prompts))

    async def _run(self, prompts: list[list[int]]) -> int:
        from prime_rl.inference.backend import GenerationRequest, SamplingParams  # noqa: PLC0415

        async def complete(index: int, prompt: list[int]) -> int:
            sampling = SamplingParams(max_tokens=self.args.new_tokens, ignore_eos=True, seed=index)
            request = GenerationRequest(
                request_id=str(index), prompt_ids=prompt, sampling=sampling, stream=self.args.stream
            )
            count = 0
            async for outputs in self.engine.generate(request):
                count += sum(output.logprob <= 0.0 for output in outputs)
            return count

        return sum(await asyncio.gather(*(complete(i, prompt) for i, prompt in enumerate(prompts))))


class Vllm:
    """vLLM through its offline API."""

    def __init__(self, args: argparse.Namespace, model_dir: Path, dtype: str) -> None:
        import torch  # noqa: PLC0415
        from vllm import LLM, SamplingParams  # noqa: PLC0415

        torch.set_num_threads(args.threads)
        self.sampling = SamplingParams(max_tokens=args.new_tokens, temperature=1.0, ignore_eos=True, logprobs=0)
        self.llm = LLM(
            model=str(model_dir),
            dtype=dtype,
            enforce_eager=True,
            max_num_seqs=args.concurrency,
            max_model_len=MAX_MODEL_LEN,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def run(self, prompts: list[list[int]]) -> int:
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self.sampling, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def serve(args: argparse.Namespace) -> None:
    """A side's process: load and warm up, then one timed run for each line read."""
    side = (Ours if args.side == "ours" else Vllm)(args, Path(args.model_dir), args.dtype)
    side.run(prompts_of(args, -1))
    print(READY, flush=True)
    for line in sys.stdin:
        prompts = prompts_of(args, int(line))
        start = time.perf_counter()
        tokens = side.run(prompts)
        seconds = time.perf_counter() - start
        assert tokens == args.requests * args.new_tokens, tokens
        print(json.dumps({"tokens_per_s": tokens / seconds}), flush=True)


class Side:
    """A side's process as the parent sees it."""

    def __init__(self, name: str, python: str, args: argparse.Namespace, model_dir: Path, dtype: str) -> None:
        forwarded = ["requests", "concurrency", "prompt_tokens", "new_tokens", "threads"]
        command = [python, str(Path(__file__).resolve()), "--side", name, "--model-dir", str(model_dir)]
        command += ["--dtype", dtype, *(["--stream"] if args.stream else [])]
        for field in forwarded:
            command += [f"--{field.replace('_', '-')}", str(getattr(args, field))]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(args.threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._read_until(READY)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its children; vLLM's poll while idle, so each side is stopped when it has no turn."""
        os.killpg(self.process.pid, number)

    def _read_until(self, beginning: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(f"the process {self.process.args} ended with code {self.process.wait()}")

    def run(self, number: int) -> float:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self._read_until("{"))
        self._signal(signal.SIGSTOP)
        return float(result["tokens_per_s"])

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()


def measure(args: argparse.Namespace, dtype: str, model_dir: Path) -> dict[str, list[float]]:
    """Tokens/s of every run of each side."""
    pythons = {"ours": sys.executable} | ({} if args.no_vllm else {"vllm": args.vllm_python})
    results: dict[str, list[float]] = {name: [] for name in pythons}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, python in pythons.items():
            sides[name] = Side(name, python, args, model_dir, dtype)
            stack.callback(sides[name].close)
        for pair in range(args.pairs):
            for name, side in sides.items():
                results[name].append(side.run(pair))
                print(f"{dtype} pair {pair} {name}: {results[name][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return results


def report(results: dict[str, dict[str, list[float]]]) -> None:
    """The table, medians and the ratio of every pair."""
    print(f"\n{'dtype':10} {'ours':>10} {'vllm':>10} {'ratio':>7}   ratio of each pair")
    for dtype, runs in results.items():
        ours = statistics.median(runs["ours"])
        if "vllm" not in runs:
            print(f"{dtype:10} {ours:10.0f} {'-':>10} {'-':>7}")
            continue
        ratios = [a / b for a, b in zip(runs["ours"], runs["vllm"], strict=True)]
        listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{dtype:10} {ours:10.0f} {statistics.median(runs['vllm']):10.0f} {statistics.median(ratios):7.2f}   "
            f"{listed}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that can import vllm")
    parser.add_argument("--no-vllm", action="store_true", help="measure our side only")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stream", action="store_true", help="our side delivers every token as it comes")
    parser.add_argument("--side", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--model-dir", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.side:
        serve(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides, which are stopped, end too
    with tempfile.TemporaryDirectory() as name:
        model_dir = Path(name)
        (model_dir / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        write_weights(model_dir)
        print(
            f"{' '.join(sys.argv)}\n{platform.processor() or platform.machine()}, {args.threads} threads, "
            f"load {os.getloadavg()[0]:.2f} before"
        )
        print(
            f"{args.requests} requests, {args.concurrency} at a time, {args.prompt_tokens} prompt tokens, "
            f"{args.new_tokens} new tokens"
        )
        report({dtype: measure(args, dtype, model_dir) for dtype in args.dtypes})


def write_weights(model_dir: Path) -> None:
    """Random weights of the model, once, so that both sides serve the same ones."""
    from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors  # noqa: PLC0415

    write_safetensors(hf_tensors(load_decoder(str(model_dir))), model_dir)


if __name__ == "__main__":
    main()
