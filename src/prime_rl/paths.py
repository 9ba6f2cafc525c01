"""Where everything of a run lies.

<output_dir>/
  configs/<process>.toml           resolved configuration, one file a process
  logs/<process>.log               rl, inference, orchestrator, trainer; environment workers under logs/envs/
  <process>/metrics.jsonl          one JSON object a step
  rollouts/step_N/                 batch N, and its rollouts in readable form
  weights/step_N/                  the weights after N optimizer steps, Hugging Face format
  checkpoints/step_N/              what a run is resumed from
  evals/step_N/<environment>/      results of evaluating weights N
  reward.svg                       the reward curve
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from prime_rl.errors import ConfigError

OWN_ENTRIES = (
    *("configs", "logs", "rollouts", "weights", "checkpoints", "evals", "eval", "orchestrator", "trainer"),
    "reward.svg",
)
"""What a run makes, and all that is ever deleted."""

RESULTS = ("rollouts", "weights", "checkpoints")
"""What a run cannot do without."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The layout of one run directory. Nothing is created here."""

    output_dir: Path

    @property
    def configs(self) -> Path:
        return self.output_dir / "configs"

    @property
    def logs(self) -> Path:
        return self.output_dir / "logs"

    @property
    def rollouts(self) -> Path:
        return self.output_dir / "rollouts"

    @property
    def weights(self) -> Path:
        return self.output_dir / "weights"

    @property
    def evals(self) -> Path:
        return self.output_dir / "evals"

    @property
    def reward_curve(self) -> Path:
        return self.output_dir / "reward.svg"

    def config(self, process: str) -> Path:
        return self.configs / f"{process}.toml"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def metrics(self, process: str) -> Path:
        return self.output_dir / process / "metrics.jsonl"


def step_dir(root: Path, step: int) -> Path:
    """`root/step_N`, the one spelling of a step's directory."""
    return root / f"step_{step}"


def check_run_dir(output_dir: Path, *, clean: bool) -> bool:
    """Whether the run directory holds another run's results. Raises: ConfigError if it does, unless `clean`."""
    found = [name for name in RESULTS if any((output_dir / name).glob("step_*"))]
    if found and not clean:
        raise ConfigError(
            f"{output_dir} already holds a run ({', '.join(found)}); "
            "choose another directory with --output-dir, or delete that run with --clean"
        )
    return bool(found)


def claim_run_dir(output_dir: Path, *, clean: bool) -> None:
    """Make the run directory ours: refuse one that holds another run's batches or weights, or with `clean` delete it.

    What a run that failed before its first batch has left (logs, empty metrics) is deleted unasked. Only entries that a
    run makes are ever deleted. Raises ConfigError.
    """
    if not check_run_dir(output_dir, clean=clean) or clean:
        for name in OWN_ENTRIES:
            entry = output_dir / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
