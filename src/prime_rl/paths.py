"""Where everything of a run lies.

<output_dir>/
  configs/<process>.toml           resolved configuration, one file a process
  logs/<process>.log               rl, inference, orchestrator, trainer; environment workers under logs/envs/
  <process>/metrics.jsonl          one JSON object a step
  rollouts/step_N/                 batch N, and its rollouts in readable form
  weights/step_N/                  the weights after N optimizer steps, Hugging Face format
  evals/step_N/<environment>/      results of evaluating weights N
  reward.svg                       the reward curve
"""

from dataclasses import dataclass
from pathlib import Path


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
