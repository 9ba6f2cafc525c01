"""Where everything of a run lies.

<output_dir>/
  configs/<process>.toml           resolved configuration, one file a process
  logs/<process>.log               rl, inference, orchestrator, trainer; environment workers under logs/envs/, those of
                                   evaluation during training under logs/envs/eval/
  logs/<process>/rank_N.log        warnings and errors of the ranks of trainer or sft behind the first
  <process>/metrics.jsonl          one JSON object a step
  rollouts/step_N/                 batch N, and its rollouts in readable form
  traces/step_N/<environment>/     every rollout that was run for batch N, whatever became of it
  weights/step_N/                  the weights after N optimizer steps, Hugging Face format; with LoRA, the adapter
  merged/step_N/                   the model with the adapter of that step in it, where it was asked for
  checkpoints/step_N/              what a run is resumed from
  recovery/step_N/                 the rolling checkpoint of a supervised run, from which its trainer is started again
  superseded/K/                    what going back to an earlier step set aside, in the same layout
  evals/step_N/<environment>/      results of evaluating weights N
  broadcasts/                      announcements of weights that are sent from GPU to GPU
  events.jsonl                     what happened besides, such as a server that was lost
  journal.jsonl                    what changed what is trained, one line an event (`journal`)
  activity/<process>.json          what each process is at, and for whom it waits
  rl.lock                          held by the launcher of the run, so that there is one; never deleted
  reward.svg                       the reward curve
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from prime_rl.errors import ConfigError

RESULTS = ("rollouts", "weights", "merged", "checkpoints", "recovery", "evals")
"""What a run cannot do without."""

SAID_DURING_A_RUN = (
    *(f"broadcasts/{entry}" for entry in ("step_*", ".step_*.tmp-*", ".step_*.gone-*", "ready_*", "FALLBACK", "DONE")),
    "events.jsonl",
    "journal.jsonl",
    "activity/*.json",
)
"""What only the processes of one run say to each other and to the console: another run would take it for its own."""

MADE_BY_A_RUN = (
    *(f"{root}/step_*" for root in RESULTS),
    *(f"{root}/.step_*.{kind}-*" for root in RESULTS for kind in ("tmp", "gone", "old")),
    *(f"configs/{process}.toml" for process in ("rl", "sft", "inference*", "orchestrator", "trainer", "eval")),
    *SAID_DURING_A_RUN,
    "traces/step_*",
    "superseded/[0-9]*",
    *(f"{process}/metrics.jsonl" for process in ("trainer", "orchestrator", "eval")),
    *(
        "logs/*.log",
        "logs/envs/*.log",
        "logs/envs/eval/*.log",
        "logs/trainer/rank_*.log",
        "logs/sft/rank_*.log",
        "reward.svg",
    ),
)
"""All that is ever deleted: patterns of the files and directories that a run makes."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The layout of one run directory. Nothing is created here."""

    output_dir: Path

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories in which a run writes; each may be a link to another disk."""
        return tuple(self.output_dir / name for name in (*RESULTS, "configs", "logs", "traces", "activity"))

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
    def traces(self) -> Path:
        return self.output_dir / "traces"

    @property
    def weights(self) -> Path:
        return self.output_dir / "weights"

    @property
    def merged(self) -> Path:
        return self.output_dir / "merged"

    @property
    def broadcasts(self) -> Path:
        return self.output_dir / "broadcasts"

    @property
    def events(self) -> Path:
        return self.output_dir / "events.jsonl"

    @property
    def journal(self) -> Path:
        return self.output_dir / "journal.jsonl"

    @property
    def activity(self) -> Path:
        return self.output_dir / "activity"

    @property
    def lock(self) -> Path:
        return self.output_dir / "rl.lock"

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def recovery(self) -> Path:
        return self.output_dir / "recovery"

    @property
    def superseded(self) -> Path:
        return self.output_dir / "superseded"

    @property
    def evals(self) -> Path:
        return self.output_dir / "evals"

    @property
    def eval_worker_logs(self) -> Path:
        """Logs of the workers of evaluation during training."""
        return self.logs / "envs" / "eval"

    @property
    def reward_curve(self) -> Path:
        return self.output_dir / "reward.svg"

    def config(self, process: str) -> Path:
        return self.configs / f"{process}.toml"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def rank_log(self, process: str, rank: int) -> Path:
        """The log of a rank behind the first, whose log is the process's."""
        return self.logs / process / f"rank_{rank}.log"

    def metrics(self, process: str) -> Path:
        return self.output_dir / process / "metrics.jsonl"


def step_dir(root: Path, step: int) -> Path:
    """`root/step_N`, the one spelling of a step's directory."""
    return root / f"step_{step}"


def drafts(root: Path) -> list[Path]:
    """Directories under `root` that somebody is writing, or was when it was killed."""
    return sorted(root.glob(".step_*.tmp-*"))


def found_results(output_dir: Path) -> list[str]:
    """Which kinds of results the run directory holds."""
    return [name for name in RESULTS if any((output_dir / name).glob("step_*"))]


def check_run_dir(output_dir: Path, *, clean: bool) -> None:
    """Raises: ConfigError where the run directory holds results already, unless `clean`."""
    found = found_results(output_dir)
    if found and not clean:
        raise ConfigError(
            f"{output_dir} already holds a run ({', '.join(found)}); choose another directory with --output-dir, go on "
            "from a checkpoint of that run with --ckpt.resume-step, or delete it with --clean"
        )


def claim_run_dir(output_dir: Path, *, clean: bool) -> None:
    """Make the run directory ours: refuse one that holds results, or with `clean` delete what a run has made there.
    What a run that had no results left of its talk goes in any case.

    Nothing else is ever deleted: not other files in the same directories, and of a link the link alone.
    Raises: ConfigError.
    """
    check_run_dir(output_dir, clean=clean)
    patterns = MADE_BY_A_RUN if clean else SAID_DURING_A_RUN
    found = [entry for pattern in patterns for entry in output_dir.glob(pattern)]
    made = {_link_above(entry, output_dir) or entry for entry in found}
    for entry in made:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    for directory in sorted({entry.parent for entry in made} - {output_dir}, key=lambda path: -len(path.parts)):
        if not any(directory.iterdir()):
            directory.rmdir()


def _link_above(entry: Path, output_dir: Path) -> Path | None:
    """The link on the way from the run directory to `entry`, if there is one."""
    inside = entry.relative_to(output_dir).parents
    return next((output_dir / part for part in reversed(inside[:-1]) if (output_dir / part).is_symlink()), None)
