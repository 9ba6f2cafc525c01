"""Generation speed of the embedded engine beside vLLM: on CPU or GPU, offline and over HTTP, in pairs in turn.

    python benchmarks/inference.py --model 3.3m --vllm-python /path/to/python-with-vllm       # CPU
    python benchmarks/inference.py --model 0.6b --new-tokens 512 --concurrency 256            # one GPU, vLLM installed
    python benchmarks/inference.py --model 0.6b --modes http --sides embedded vllm stock

All sides serve the same random model with the same prompts, token ids in and out, with a logprob for every token,
warm, on the same threads; each side runs while the others are stopped. `embedded` and `vllm` are the two backends of
`inference`, `stock` is vLLM's own server without anything of ours (HTTP only). Figures are output tokens per second;
what counts is the ratio within a pair, since a machine's speed drifts.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from http_load import Workload
from models import DTYPES, SHAPES, make_model
from sides import Http, Offline, Setting, Side

from prime_rl.monitors.tables import aligned

SIDES = ("embedded", "vllm", "stock")
Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""Side -> its runs."""


def measure(mode: str, runs: Mapping[str, list[dict[str, float]]], setting: Setting, pairs: int, until: float) -> None:
    """Add the runs of each side to its list in `runs`, pair after pair; none that would not be done by `until`."""
    kind = {"offline": Offline, "http": Http}[mode]
    what = f"{mode} {setting.dtype}"
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name in runs:
            sides[name] = kind(name, setting)
            stack.callback(sides[name].close)
        began = time.monotonic()
        for name, side in sides.items():
            side.warm_up()
            print(f"{what} {name}: warm after {time.monotonic() - began:.0f} s", flush=True)
        for pair in range(pairs):
            began = time.monotonic()
            found = {}
            for name, side in sides.items():
                found[name] = side.run(pair)
                speed, seconds = found[name]["tokens_per_s"], found[name]["seconds"]
                print(f"{what} pair {pair} {name}: {speed:.0f} tokens/s in {seconds:.1f} s", flush=True)
            for name, run in found.items():
                runs[name].append(run)
            now = time.monotonic()
            if pair + 1 < pairs and now + (now - began) > until:
                print(f"{what}: no time for more than {pair + 1} of {pairs} pairs", flush=True)
                return


def report(results: Mapping[tuple[str, str], Runs]) -> str:
    """Medians of each side, and the ratio of the first to the second within every pair."""
    lines = [["mode dtype", "side", "tokens/s", "p50 s", "p99 s", "client CPU s", "ratio", "ratio of each pair"]]
    for (mode, dtype), runs in results.items():
        first = next(iter(runs.values()))
        for name, own in runs.items():
            ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(first, own, strict=True)]
            listed = [] if own is first else [f"{ratio:.2f}" for ratio in ratios]
            lines.append(
                [
                    f"{mode} {dtype}",
                    name,
                    *(_median(own, key, form) for key, form in _SHOWN.items()),
                    f"{statistics.median(ratios):.2f}" if listed else "",
                    " ".join(listed),
                ]
            )
    return aligned(lines)


_SHOWN = {"tokens_per_s": ",.0f", "p50_s": ".2f", "p99_s": ".2f", "client_cpu_s": ".2f"}


def _median(runs: Sequence[Mapping[str, float]], key: str, form: str) -> str:
    values = [run[key] for run in runs if key in run]
    return f"{statistics.median(values):{form}}" if values else "-"


def machine() -> str:
    """The machine in a line: processor, cores, load, GPU."""
    model = next((line for line in _cpu_info() if line.startswith("model name")), platform.machine())
    gpu = "no GPU"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = ", ".join(subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[:-1])
    cores = len(os.sched_getaffinity(0))
    return f"{model.partition(':')[2].strip() or model}, {cores} cores, load {os.getloadavg()[0]:.2f} before, {gpu}"


def _cpu_info() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, visible or not; where there are any, sides compute on the first visible one."""
    if not shutil.which("nvidia-smi"):
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="3.3m")
    parser.add_argument("--modes", nargs="+", choices=["offline", "http"], default=["offline", "http"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["embedded", "vllm"])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: float32 on CPU, bfloat16 on a GPU")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that can import vllm")
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without CUDA graphs; always so on CPU")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; pairs that would not fit are left out")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--no-logprobs", action="store_true")
    parser.add_argument("--top-p", type=float, default=1.0, help="of every request, on all sides")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="likewise")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1, help="client processes over HTTP")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of each side")
    parser.add_argument("--logs", type=Path, help="directory for the sides' logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file that every run is written to as well")
    return parser.parse_args()


def settings(args: argparse.Namespace, directory: Path) -> dict[str, Setting]:
    """One for each dtype."""
    device = args.device or ("cuda" if num_gpus() else "cpu")
    work = Workload(
        requests=args.requests,
        concurrency=args.concurrency,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        vocab=SHAPES[args.model].vocab,
        logprobs=not args.no_logprobs,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
    )
    logs = args.logs or directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    made = {}
    for dtype in args.dtypes or (["float32"] if device == "cpu" else ["bfloat16"]):
        model_dir = directory / f"{args.model}-{dtype}"
        make_model(args.model, model_dir, dtype)
        made[dtype] = Setting(
            model_dir=model_dir,
            dtype=dtype,
            work=work,
            device=device,
            threads=args.threads,
            gpu_memory_utilization=args.gpu_memory_utilization,
            num_clients=args.clients,
            vllm_python=args.vllm_python,
            enforce_eager=args.enforce_eager or device == "cpu",
            logs=logs,
            kv_cache_gb=kv_cache_gb(args.model, dtype, work),
        )
    return made


def kv_cache_gb(model: str, dtype: str, work: Workload) -> float:
    """GiB for the keys and values of all requests at a time, and a quarter more."""
    shape = SHAPES[model]
    per_token = 2 * shape.layers * shape.kv_heads * shape.head * {"float32": 4, "bfloat16": 2}[dtype]
    tokens = work.concurrency * (work.prompt_tokens + work.new_tokens + 8)
    return max(1.0, 1.25 * tokens * per_token / 2**30)


def main() -> None:
    args = parse()
    until = time.monotonic() + args.budget
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides, which are stopped, end too
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    results: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            for dtype, setting in settings(args, Path(name)).items():
                for mode in args.modes:
                    names = [side for side in args.sides if mode == "http" or side != "stock"]
                    results[mode, dtype] = {side: [] for side in names}
                    measure(mode, results[mode, dtype], setting, args.pairs, until)
    finally:
        conclude(args, {key: runs for key, runs in results.items() if all(runs.values())})


def conclude(args: argparse.Namespace, results: Mapping[tuple[str, str], Runs]) -> None:
    """Print what was measured, be it all or only some pairs."""
    if not results:
        return
    print(
        f"{args.model}: {args.requests} requests, {args.concurrency} at a time, {args.prompt_tokens} prompt + "
        f"{args.new_tokens} new tokens, {'no ' if args.no_logprobs else ''}logprobs, top_p {args.top_p:g}, "
        f"repetition_penalty {args.repetition_penalty:g}; medians of up to {args.pairs} runs\n"
    )
    print(report(results), flush=True)
    if args.json:
        args.json.write_text(json.dumps({" ".join(key): runs for key, runs in results.items()}, indent=1))


if __name__ == "__main__":
    main()
