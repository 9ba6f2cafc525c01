"""The RL trainer as a process: `trainer`, or this file under `torchrun`. What needs torch is in `trainer.rl.build`."""

from prime_rl.config.trainer import TrainerConfig
from prime_rl.imports import importing
from prime_rl.trainer.script import main


def run(config: TrainerConfig) -> None:
    """Train on batches 0, 1, ... of `output_dir`, or on made-up ones, until `max_steps`.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    with importing():
        from prime_rl.trainer.rl.build import train_rl  # noqa: PLC0415 (a dry run imports no torch)

    train_rl(config)


if __name__ == "__main__":
    main("trainer", TrainerConfig, run)
