"""What a checkpoint costs: steps that save nothing, that wait for the files, and that have a thread write them.

    python benchmarks/checkpoint.py                     the demo's model and tokens a step, on the CPU
    python benchmarks/checkpoint.py --device cuda       the 0.6B shape in bfloat16 with float32 weights and AdamW: 7 GB
    python benchmarks/checkpoint.py --json FILE         the figures as well

Every variant is `trainer` on made-up batches in a process of its own. A period is the time from one row of metrics to
the next: a row is written at the end of a step, before its checkpoint, so the period behind it holds what training
waits for the checkpoint and all of the next step, whose update waits for the copy. Figures are medians after a warm-up
that holds the first checkpoint; `all` is the mean of all periods, in which the writing beside training shows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from prime_rl.monitors.base import read_metrics
from prime_rl.monitors.tables import aligned
from prime_rl.paths import RunPaths

MODELS = Path(__file__).with_name("models.py")
VARIANTS = {"no save": [], "synchronous": ["--ckpt"], "asynchronous": ["--ckpt", "--ckpt.save-async"]}
INTERVAL = 5
DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained."""

    shape: str
    dtype: str
    seq_len: int
    batch_size: int


WORKLOADS = {
    "cpu": Workload(shape="3.3m", dtype="float32", seq_len=128, batch_size=32),
    "cuda": Workload(shape="0.6b", dtype="bfloat16", seq_len=8192, batch_size=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds."""

    other: float
    """Periods without a checkpoint."""
    saving: float
    """Periods with one."""
    all: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=WORKLOADS, default="cpu")
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; a temporary one by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.device]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        root = Path(directory)
        model = [str(root / "model"), "--dtype", workload.dtype]
        subprocess.run([sys.executable, str(MODELS), workload.shape, *model], check=True)
        found = {name: measured(root, name, workload, args.device, args.steps) for name in VARIANTS}
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({name: asdict(figures) for name, figures in found.items()}, indent=2) + "\n")


def measured(root: Path, name: str, workload: Workload, device: str, steps: int) -> Figures:
    """One run of the trainer."""
    output = root / name.replace(" ", "_")
    flags = {
        "model.name": root / "model",
        "model.seq_len": workload.seq_len,
        "model.optimization_dtype": workload.dtype,
        "data.fake.batch_size": workload.batch_size,
        "data.fake.seq_len": workload.seq_len,
        "max_steps": steps,
        "device": device,
        "output_dir": output,
    }
    command = [sys.executable, "-c", "import sys; from prime_rl.cli import trainer; sys.exit(trainer())"]
    command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    if VARIANTS[name]:
        command += [*VARIANTS[name], "--ckpt.interval", str(INTERVAL), "--ckpt.keep-last", "1"]
    subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    return figures(read_times(output))


def read_times(output: Path) -> list[float]:
    """When each step's row was written, seconds since the epoch."""
    return [row["time"] or 0.0 for row in read_metrics(RunPaths(output).metrics("trainer"))]


def figures(times: list[float]) -> Figures:
    """From the times of rows 0, 1, ..., of which the first INTERVAL + 2 are for warming up.

    A checkpoint behind step n lies between rows n and n + 1.
    """
    periods = {step: later - earlier for step, (earlier, later) in enumerate(pairwise(times))}
    counted = {step: period for step, period in periods.items() if step >= INTERVAL + 2}
    saving = [period for step, period in counted.items() if (step + 1) % INTERVAL == 0]
    other = [period for step, period in counted.items() if (step + 1) % INTERVAL]
    return Figures(other=median(other), saving=median(saving), all=fmean(counted.values()))


def table(found: dict[str, Figures]) -> str:
    """The base of every ratio are the periods of the run that saves nothing."""
    base = found["no save"]
    rows = [["", "other steps", "step that saves", "ratio", "all", "ratio"]]
    for name, one in found.items():
        share, whole = one.saving / base.other, one.all / base.all
        rows.append(
            [name, f"{one.other:.3f} s", f"{one.saving:.3f} s", f"{share:.2f}", f"{one.all:.3f} s", f"{whole:.2f}"]
        )
    return aligned(rows)


if __name__ == "__main__":
    main()
