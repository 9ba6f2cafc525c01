"""SFT as a process: `sft`, or this file under `torchrun`. What needs torch is in `trainer.sft.build`."""

from prime_rl.config.trainer import SFTConfig
from prime_rl.imports import importing
from prime_rl.trainer.script import main


def run(config: SFTConfig) -> None:
    """Fine-tune until `max_steps`; `weights/step_N` at multiples of `weights.interval` and at the end.

    Raises: PrimeRLError of any kind, with what to do in its message.
    """
    with importing():
        from prime_rl.trainer.sft.build import train_sft  # noqa: PLC0415 (a dry run imports no torch)

    train_sft(config)


if __name__ == "__main__":
    main("sft", SFTConfig, run)
