"""The trainer's speed and memory on made-up batches, beside PRIME-RL's published figures.

    python benchmarks/trainer.py                               the main rows, most important first
    python benchmarks/trainer.py --rows long rl-0.6b-16k       sets of rows, and rows by name
    python benchmarks/trainer.py --profile rl-0.6b-16k         where a step's GPU time goes
    python benchmarks/trainer.py --rows scaling                one, two and four GPUs under torchrun
    python benchmarks/trainer.py --dry-run                     all of that with a tiny model, on any machine

Every row is `trainer --bench` or `sft --bench` in a process of its own, with a deadline; one that runs out of memory
says so. Models have random weights and are made here by another process: no network is needed. Figures are medians of
5 steps after 3. A micro-batch is one document of the full length, two a step (each rank), unless the row says mixed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import SHAPES, config_of, write_tokenizer
from step_profile import Step, read_step

from prime_rl.monitors.tables import aligned

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP = 8, 3
TRACED = 5  # steps of a profile; the last one is read
MATMUL_FLOPS = 790e12
"""What an 8192-cubed bfloat16 product of random numbers reaches on an H200."""
TINY, TINY_DIVISOR = "3.3m", 256
OUT_OF_MEMORY = ("memory is full", "OutOfMemoryError", "out of memory")
K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One H100, from PRIME-RL's BENCHMARKS.md and its baselines' JSON (2026-01 and -02)."""

    tokens_per_s: float
    """Over the whole loop; for RL with a write of all weights to disk in each step."""
    mfu: float
    peak_gib: float
    compute_s: float
    """Of a step of two micro-batches, from the JSON: without that write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    set: str
    command: str
    model: str
    seq_len: int
    flags: tuple[str, ...] = ()
    published: Published | None = None
    goal: float | None = None
    """Times the published tokens/s."""
    mixed: int | None = None
    """Documents a step, of 2 to `seq_len` tokens, new ones in each step. None: two of `seq_len`."""
    row_len: int | None = None
    """Tokens of a micro-batch of mixed documents. None: `seq_len`."""
    ranks: int = 1
    limit_s: int = 180


FULL_AC = ("--model.ac.mode", "full")
WHOLE_AC = (*FULL_AC, "--model.ac.keep-attention", "false")
COMPILE = ("--model.compile.fullgraph", "false")
LORA = ("--model.lora.rank", "16")
OFFLOAD = ("--model.ac-offloading.pin-memory", "true")


def published(tokens_per_s: float, mfu: float, peak_gib: float, compute_s: float) -> Published:
    return Published(tokens_per_s=tokens_per_s, mfu=mfu, peak_gib=peak_gib, compute_s=compute_s)


def row(name: str, set_: str, flags: Sequence[str], **others: Any) -> Row:
    """The command, model and length are in the name: `rl-0.6b-16k`, `sft-0.6b-8k-noac`."""
    kind, model, *rest = name.split("-")
    length = next(word for word in rest if word.endswith("k") and word[:-1].isdigit())
    command = {"rl": "trainer", "sft": "sft"}[kind]
    return Row(
        name=name, set=set_, command=command, model=model, seq_len=int(length[:-1]) * K, flags=(*flags,), **others
    )


PUBLISHED = {
    "rl-0.6b-16k": published(11_896, 11.1, 12.5, 1.992),
    "rl-0.6b-64k": published(10_147, 26.8, 19.6, 12.176),
    "rl-0.6b-64k-offload": published(9_977, 26.4, 16.1, 12.463),
    "rl-0.6b-lora-16k": published(13_342, 10.9, 5.1, 2.453),
    "rl-0.6b-lora-64k": published(9_967, 25.2, 11.5, 13.156),
    "rl-0.6b-lora-64k-offload": published(9_782, 24.7, 7.9, 13.401),
    "sft-0.6b-8k": published(26_005, 16.8, 31.7, 0.6225),
    "sft-0.6b-16k": published(25_486, 23.7, 52.8, 1.282),
    "rl-4b-lora-16k": published(6_229, 21.7, 23.3, 5.260),
    "rl-4b-lora-16k-offload": published(5_952, 20.7, 20.6, 5.504),
    "rl-4b-lora-64k": published(4_164, 37.4, 42.0, 31.49),
    "rl-4b-lora-64k-offload": published(4_043, 36.3, 31.1, 32.44),
}


def beside(name: str, set_: str, flags: Sequence[str], **others: Any) -> Row:
    """A row at the setting of a published one."""
    return row(name, set_, flags, published=PUBLISHED[name], **others)


def variant(name: str, of: str, set_: str, flags: Sequence[str], **others: Any) -> Row:
    """Another setting for the work of a published row."""
    return row(name, set_, flags, published=PUBLISHED[of], **others)


ROWS = (
    beside("rl-0.6b-16k", "main", (*COMPILE, *WHOLE_AC), goal=3.0),
    beside("rl-4b-lora-16k", "main", (*COMPILE, *WHOLE_AC, *LORA), goal=1.6),
    beside("sft-0.6b-8k", "main", (*COMPILE, *WHOLE_AC), goal=2.0),
    beside("rl-0.6b-64k", "main", (*COMPILE, *WHOLE_AC), goal=1.4, limit_s=220),
    variant("rl-0.6b-16k-noac", "rl-0.6b-16k", "main", COMPILE),
    variant("rl-0.6b-16k-keep", "rl-0.6b-16k", "main", (*COMPILE, *FULL_AC)),
    variant("sft-0.6b-8k-noac", "sft-0.6b-8k", "main", COMPILE),
    variant("rl-0.6b-16k-eager", "rl-0.6b-16k", "main", WHOLE_AC),
    row("rl-0.6b-16k-mixed", "main", (*COMPILE, *FULL_AC), mixed=16),
    row("rl-0.6b-2k-mixed", "main", (*COMPILE, *FULL_AC), mixed=64, row_len=16 * K),
    variant("rl-4b-lora-16k-noac", "rl-4b-lora-16k", "long", (*COMPILE, *LORA)),
    beside("sft-0.6b-16k", "long", (*COMPILE, *WHOLE_AC)),
    beside("rl-0.6b-lora-16k", "long", (*COMPILE, *WHOLE_AC, *LORA)),
    variant("rl-0.6b-64k-keep", "rl-0.6b-64k", "long", (*COMPILE, *FULL_AC), limit_s=220),
    beside("rl-0.6b-lora-64k", "long", (*COMPILE, *WHOLE_AC, *LORA), limit_s=220),
    beside("rl-4b-lora-64k", "long", (*COMPILE, *WHOLE_AC, *LORA), limit_s=330),
    variant(
        "rl-0.6b-16k-head", "rl-0.6b-16k", "more", (*COMPILE, *FULL_AC, "--model.fused-lm-head-chunk-size", "16384")
    ),
    *(
        variant(f"rl-0.6b-16k-{kernel}", "rl-0.6b-16k", "more", (*COMPILE, *FULL_AC, "--model.attn", kernel))
        for kernel in ("sdpa", "varlen")
    ),
    row("sft-0.6b-64k", "more", (*COMPILE, *FULL_AC), limit_s=220),  # published: out of memory
    variant("rl-0.6b-64k-noac", "rl-0.6b-64k", "more", COMPILE, limit_s=220),
    beside("rl-0.6b-64k-offload", "offload", (*COMPILE, *WHOLE_AC, *OFFLOAD), limit_s=220),
    beside("rl-0.6b-lora-64k-offload", "offload", (*COMPILE, *WHOLE_AC, *OFFLOAD, *LORA), limit_s=220),
    beside("rl-4b-lora-16k-offload", "offload", (*COMPILE, *WHOLE_AC, *OFFLOAD, *LORA)),
    beside("rl-4b-lora-64k-offload", "offload", (*COMPILE, *WHOLE_AC, *OFFLOAD, *LORA), limit_s=330),
    *(row(f"sft-4b-8k-x{n}", "scaling", (*COMPILE, *FULL_AC), ranks=n, limit_s=240) for n in (1, 2, 4)),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a row."""

    row: Row
    status: str
    seconds: float = 0.0
    median: Mapping[str, float] = field(default_factory=dict)
    profile: Step | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how rows run."""

    logs: Path
    models: Path
    device: str
    is_tiny: bool
    python: str

    def length(self, tokens: int) -> int:
        return max(32, tokens // TINY_DIVISOR) if self.is_tiny else tokens

    def model_dir(self, row: Row) -> Path:
        """Made when it is first asked for, by a process of its own."""
        name = TINY if self.is_tiny else row.model
        directory = self.models / name
        if not (directory / "config.json").exists():
            words = [self.python, str(Path(__file__)), "--make", name, str(directory)]
            subprocess.run(words, check=True, timeout=300, env=self.environment())
        return directory

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        threads = {"OMP_NUM_THREADS": "1"} if self.is_tiny else {}
        return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | threads

    def words(self, row: Row, out: Path, steps: int, extra: Sequence[str]) -> list[str]:
        """The command line of a row."""
        seq_len, row_len = self.length(row.seq_len), self.length(row.row_len or row.seq_len)
        flags = list(row.flags)
        if self.is_tiny and COMPILE[0] in flags:  # minutes on a CPU, and no other code of ours
            del flags[flags.index(COMPILE[0]) : flags.index(COMPILE[0]) + 2]
        common = {
            "model.name": self.model_dir(row),
            "model.seq-len": row_len,
            "model.optimization-dtype": "float32" if self.is_tiny else "bfloat16",  # slow on most CPUs
            "output-dir": out / "run",
            "device": self.device,
            "bench.steps": steps,
            "bench.warm-up": steps - 1 if extra else WARM_UP,
            "bench.output-json": out / "bench.json",
        }
        words = [f"--{key}={value}" for key, value in (common | self._data(row, seq_len, row_len)).items()]
        return [*self._start(row), *words, *flags, *extra]

    def _data(self, row: Row, seq_len: int, row_len: int) -> dict[str, Any]:
        length = "variable" if row.mixed else "fixed"
        if row.command == "sft":
            sizes = {"type": "fake", "input-ids": "random", "batch-size": 2 * row.ranks, "micro-batch-size": 1}
            return {f"data.{key}": value for key, value in (sizes | {"length": length, "seq-len": seq_len}).items()}
        sizes = {"batch-size": row.mixed or 2, "micro-batch-size": row_len // seq_len, "seq-len": seq_len}
        fake = sizes | {"length": length, "generate-samples": str(bool(row.mixed)).lower()}
        return {f"data.fake.{key}": value for key, value in fake.items()}

    def _start(self, row: Row) -> list[str]:
        if row.ranks == 1:
            return [self.python, "-m", "prime_rl.cli", row.command]
        file = ROOT / "src/prime_rl/trainer" / {"trainer": "rl", "sft": "sft"}[row.command] / "train.py"
        agent = [self.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
        return [*agent, str(file)]

    def run(self, row: Row, limit_s: float, *, is_profile: bool) -> Outcome:
        """Run a row to its end, its deadline, or the end of the memory."""
        out = self.logs / (f"{row.name}-profile" if is_profile else row.name)
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / "bench.json", *out.glob("traces/*")):
            old.unlink(missing_ok=True)
        extra = ["--trace-path", str(out / "traces")] if is_profile else []
        words = self.words(row, out, TRACED if is_profile else STEPS, extra)
        begun = time.monotonic()
        code = run_until(words, limit_s, out / "log.txt", self.environment())
        outcome = Outcome(row=row, status=status_of(code, out / "log.txt"), seconds=time.monotonic() - begun)
        if outcome.status == "ok":
            outcome.median = json.loads((out / "bench.json").read_text())["median"]
        if outcome.status == "ok" and is_profile:
            outcome.profile = read_step(out / "traces" / f"step_{TRACED - 1}_rank_0.json.gz")
        return outcome


def run_until(words: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str]) -> int | None:
    """Exit code of a command, or None where the deadline ended it and all that it had started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(words), stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def status_of(code: int | None, log: Path) -> str:
    """`ok`, or in a few words why there is no figure."""
    text = log.read_text(errors="replace")
    if code == 0:
        return "ok"
    if any(sign in text for sign in OUT_OF_MEMORY):
        return "out of memory"
    if code is None:
        return "deadline"
    lines = [line for line in text.splitlines() if line.strip()]
    return f"failed: {lines[-1][:160] if lines else f'exit code {code}'}"


def comparison(outcomes: Sequence[Outcome]) -> str:
    """Ours beside the published figures: whole steps with whole steps, computation with computation."""
    head = ["row", "tok/s", "publ.", "x", "goal", "compute tok/s", "publ.", "x", "MFU' %", "publ.", "MFU %"]
    lines = [[*head, "peak GiB", "publ.", "step s", "compute s", "publish s"]]
    for outcome in outcomes:
        row, median = outcome.row, outcome.median
        if not median:
            lines.append([row.name, outcome.status, *["" for _ in lines[0][2:]]])
            continue
        whole, compute = median["perf/throughput"], median["perf/throughput_compute"]
        theirs = row.published
        compute_theirs = 2 * row.seq_len / theirs.compute_s if theirs else None
        lines.append(
            [
                row.name,
                *(f"{whole:,.0f}", shown(theirs and theirs.tokens_per_s, ",.0f")),
                *(ratio(whole, theirs and theirs.tokens_per_s), shown(row.goal, ".1f")),
                *(f"{compute:,.0f}", shown(compute_theirs, ",.0f"), ratio(compute, compute_theirs)),
                *(shown(median.get("perf/mfu_published_compute"), ".1f"), shown(theirs and theirs.mfu, ".1f")),
                shown(median.get("perf/mfu_compute"), ".1f"),
                *(f"{median['perf/peak_memory_gib']:.1f}", shown(theirs and theirs.peak_gib, ".1f")),
                *(f"{median[f'time/{name}']:.3f}" for name in ("step", "forward_backward", "publish")),
            ]
        )
    return aligned(lines)


def scaling(outcomes: Sequence[Outcome]) -> str:
    """Tokens/s of a GPU among several, against that of one alone."""
    measured = {outcome.row.ranks: outcome.median for outcome in outcomes if outcome.median}
    lines = [["GPUs", "tok/s", "tok/s a GPU", "efficiency"]]
    for ranks, median in sorted(measured.items()):
        each = median["perf/throughput_compute"] / ranks
        alone = measured.get(1, {}).get("perf/throughput_compute")
        lines.append([str(ranks), f"{each * ranks:,.0f}", f"{each:,.0f}", shown(alone and each / alone, ".3f")])
    return aligned(lines)


def profile_table(outcome: Outcome, ideal: Mapping[str, float]) -> str:
    """Where the time of a step went, and what its counted FLOPs would take at the rate of a large product."""
    assert outcome.profile is not None
    step = outcome.profile
    lines = [["part", "s", "share %", "kernels", "at 790 TFLOP/s", "largest kernel"]]
    for part, spent in sorted(step.parts.items(), key=lambda item: -item[1].seconds):
        least = shown(ideal.get(part), ".3f")
        share = f"{100 * spent.seconds / step.seconds:.1f}"
        lines.append([part, f"{spent.seconds:.3f}", share, str(spent.num_kernels), least, spent.largest[:60]])
    idle = max(0.0, step.seconds - step.busy_s)
    lines.append(["nothing ran", f"{idle:.3f}", f"{100 * idle / step.seconds:.1f}", "", "", ""])
    lines.append(["step", f"{step.seconds:.3f}", "100.0", "", f"{sum(ideal.values()):.3f}", ""])
    return aligned(lines)


def ideal_seconds(row: Row, directory: Path, seq_len: int) -> dict[str, float]:
    """Of a step of two documents: FLOPs of each part (nothing counted twice) over MATMUL_FLOPS."""
    import torch  # noqa: PLC0415 (the tables need none)

    from prime_rl.config.trainer import LoRAConfig  # noqa: PLC0415
    from prime_rl.models.decoder import Decoder  # noqa: PLC0415
    from prime_rl.models.hf import load_config, read_json  # noqa: PLC0415
    from prime_rl.trainer.model.adapters import add_adapters  # noqa: PLC0415
    from prime_rl.trainer.perf import cost_of  # noqa: PLC0415

    with torch.device("meta"):
        model = Decoder(load_config(directory))
        if LORA[0] in row.flags:
            add_adapters(model, LoRAConfig(rank=16))
    cost = cost_of(model, read_json(directory / "config.json"))
    tokens = 2 * seq_len
    whole = cost.true_flops(num_tokens=tokens, num_loss_tokens=tokens, seq_lens=[seq_len] * 2)
    parts = {"matmul": cost.body_flops(tokens), "head": cost.head_flops(tokens)}
    parts["attention"] = whole - sum(parts.values())
    return {part: flops / MATMUL_FLOPS for part, flops in parts.items()}


def ratio(ours: float, theirs: float | None) -> str:
    return shown(theirs and ours / theirs, ".2f")


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def make_model(name: str, directory: Path) -> None:
    """A directory with random bfloat16 weights, drawn on the GPU where there is one."""
    import torch  # noqa: PLC0415 (only this process computes)

    from prime_rl.models.decoder import DecoderConfig  # noqa: PLC0415
    from prime_rl.models.hf import empty_decoder, write_safetensors  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(name, "bfloat16") | {"max_position_embeddings": 128 * K}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def drawn(name: str, shape: torch.Size) -> torch.Tensor:
        ones = torch.ones(shape, dtype=torch.bfloat16, device=device)
        return ones if name.endswith("norm.weight") else ones.normal_(0.0, 0.02)

    shapes = empty_decoder(DecoderConfig.from_hf(config), device="meta", dtype=torch.bfloat16).named_parameters()
    write_safetensors(((key, drawn(key, parameter.shape)) for key, parameter in shapes), directory)
    write_tokenizer(config["vocab_size"], directory)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")  # last: the directory is whole


def chosen_rows(words: Sequence[str]) -> list[Row]:
    """Rows by name and by set, in the order of the list."""
    known = {row.name for row in ROWS} | {row.set for row in ROWS} | {"all"}
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"no rows {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [row for row in ROWS if {row.name, row.set, "all"} & set(words)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=None, help="names or sets: main, long, more, offload, scaling, all"
    )
    parser.add_argument("--profile", nargs="+", default=[], metavar="ROW", help="rows to trace, after the others")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; what does not fit in is named")
    parser.add_argument("--logs", type=Path, default=None, help="logs and traces (default: a new directory)")
    parser.add_argument("--models", type=Path, default=None, help="where models are made, 10 GB (default: in --logs)")
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU: tries the script")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--make", nargs=2, metavar=("MODEL", "DIRECTORY"), help="only make a model")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.make:
        make_model(args.make[0], Path(args.make[1]))
        return
    rows = chosen_rows(args.rows if args.rows is not None else [] if args.profile else ["main"])
    profiled = chosen_rows(args.profile)
    logs = (args.logs or Path(tempfile.mkdtemp(prefix="trainer-bench-"))).resolve()
    bench = Bench(
        logs=logs,
        models=(args.models or logs / "models").resolve(),
        device="cpu" if args.dry_run else "cuda",
        is_tiny=args.dry_run,
        python=args.python,
    )
    print(f"logs in {logs}/", flush=True)
    if args.dry_run:
        print("dry run: a tiny model and short documents on the CPU; the figures mean nothing", flush=True)
    deadline = time.monotonic() + args.budget
    outcomes: list[Outcome] = []
    for row, is_profile in [*((row, False) for row in rows), *((row, True) for row in profiled)]:
        left = deadline - time.monotonic()
        outcome = Outcome(row=row, status="not run: no time left")
        if left > 30:
            bench.model_dir(row)
            outcome = bench.run(row, min(row.limit_s, deadline - time.monotonic()), is_profile=is_profile)
        outcomes.append(outcome)
        print(f"{row.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        if outcome.profile is not None:
            ideal = ideal_seconds(row, bench.model_dir(row), bench.length(row.seq_len))
            print(f"\n{profile_table(outcome, ideal)}\n", flush=True)
    if args.json is not None:
        write_json(args.json, outcomes)
    report(outcomes[: len(rows)])
    sys.exit(any(outcome.status.startswith(("failed", "deadline")) for outcome in outcomes))


def report(outcomes: Sequence[Outcome]) -> None:
    """The tables, and what their columns mean."""
    if outcomes:
        print(f"\n{comparison(outcomes)}\n")
        print("x: ours over the published (one H100, same arithmetic peak). tok/s: over whole steps, with publication;")
        print("compute: forward, backward and optimizer; published compute from the step times of their JSON.")
        print("MFU': PRIME-RL's formula. MFU: causal attention, head on tokens in the loss. Both over computation.")
    if any(outcome.row.set == "scaling" for outcome in outcomes):
        print(f"\n{scaling([outcome for outcome in outcomes if outcome.row.set == 'scaling'])}")


def write_json(file: Path, outcomes: Sequence[Outcome]) -> None:
    rows = [
        {"row": o.row.name, "status": o.status, "seconds": round(o.seconds, 1), "median": dict(o.median)}
        | ({"profile": o.profile.as_json()} if o.profile else {})
        for o in outcomes
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    assert TINY in SHAPES
    main()
