"""The front of a training process: `trainer` and `sft` as commands, and their train files as scripts under `torchrun`.

No torch in here: a dry run needs none.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from prime_rl.config.command import Files, begin, run_command
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.paths import check_run_dir, claim_run_dir

Config = TypeVar("Config", bound=TrainerConfig | SFTConfig)


def main(name: str, root: type[Config], run: Callable[[Config], None], argv: Sequence[str] | None = None) -> None:
    """What the command `name` does with a command line, by default this process's; at last `run`.

    Of the processes that `torchrun` starts with one command line, the first one speaks and writes.
    """

    def work(config: Config) -> None:
        if isinstance(config, SFTConfig):  # the trainer shares its directory with an orchestrator
            claim_run_dir(config.output_dir, clean=config.clean)
        begin(name, config)
        run(config)

    def files(config: Config) -> Files:
        if isinstance(config, SFTConfig):
            check_run_dir(config.output_dir, clean=config.clean)
        return {name: config}

    def check(config: Config) -> None:
        refuse_several_processes()

    run_command(name, root, work, argv=argv, files=files, check=check)


def refuse_several_processes() -> None:
    """Raises: ConfigError where this is one of several ranks."""
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"the trainer runs as one process in this version, not as {world_size}: drop --nproc-per-node"
        )
