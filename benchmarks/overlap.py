"""How much time asynchrony saves: a waiting environment, a trainer step of the same length, level 1 against level 0.

    python benchmarks/overlap.py --steps 20 --repeats 1

Each pair runs level 1, then level 0, on the same untrained model; the time counted is from the first trained step to
the last. With both sides taking 1 s, perfect overlap gives 0.5.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_seconds(level: int, args: argparse.Namespace) -> float:
    """Seconds between the end of the first and of the last training step of one run."""
    with tempfile.TemporaryDirectory() as out:
        argv = [sys.executable, "-m", "prime_rl.cli", "rl", "--output-dir", out, "--max-async-level", str(level)]
        argv += ["--model.name", str(ROOT / "examples/reverse_text_cpu/model"), "--seq-len", "128"]
        argv += ["--inference.server.port", str(free_port()), "--max-steps", str(args.steps)]
        argv += ["--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4"]
        argv += ["--orchestrator.sampling.max-tokens", "16", "--orchestrator.env.id", "waiting-env"]
        argv += [
            "--orchestrator.env.args",
            f'{{"wait_s": {args.wait}}}',
            "--trainer.debug.min-step-time",
            str(args.wait),
        ]
        paths = [str(ROOT / "benchmarks" / "environments"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(argv, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        times = [row["time"] or 0.0 for row in read_metrics(RunPaths(Path(out)).metrics("trainer"))]
        assert len(times) == args.steps
        return times[-1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds of the environment and of a trainer step")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    pairs = [(run_seconds(1, args), run_seconds(0, args)) for _ in range(args.repeats)]
    print(f"{args.steps} steps, environment and trainer step {args.wait} s each")
    print(f"{'level 1':>10} {'level 0':>10} {'ratio':>7}")
    for fast, slow in pairs:
        print(f"{fast:>9.1f}s {slow:>9.1f}s {fast / slow:>7.3f}")
    print(f"median ratio {statistics.median(fast / slow for fast, slow in pairs):.3f}")
    print(f"command: python benchmarks/overlap.py --steps {args.steps} --wait {args.wait} --repeats {args.repeats}")


if __name__ == "__main__":
    main()
