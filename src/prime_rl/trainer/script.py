"""A train file as a script, so that `torchrun` can start it. No torch in here: a dry run needs none."""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from prime_rl.config.command import is_first_rank, record_config, run_command
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.lifeline import watch_launcher
from prime_rl.logs import setup_logging
from prime_rl.paths import RunPaths

Config = TypeVar("Config", TrainerConfig, SFTConfig)


def main(name: str, root: type[Config], run: Callable[[Config], None]) -> None:
    """What the command `name` does with the command line of this process, then `run`.

    Of the processes that `torchrun` starts with one command line, the first one speaks and writes.
    """

    def work(config: Config) -> None:
        if not is_first_rank():
            sys.exit(1)
        refuse_several_processes()
        paths = RunPaths(config.output_dir)
        record_config(config, name, paths)
        file = paths.log(name) if config.log.file else None
        setup_logging(name, config.log.level, file, as_json=config.log.json_logging)
        watch_launcher()
        run(config)

    run_command(name, root, work)


def refuse_several_processes() -> None:
    """Raises: ConfigError where this is one of several ranks."""
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"the trainer runs as one process in this version, not as {world_size}: drop --nproc-per-node"
        )
