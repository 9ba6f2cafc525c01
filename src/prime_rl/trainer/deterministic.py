"""The same from the same, to the last bit: what torch must be told, and where it cannot be held."""

import torch

from prime_rl.errors import ConfigError


def make_deterministic(device: torch.device) -> None:
    """For the rest of this process. Raises: ConfigError for a GPU.

    What is drawn (dropout) is seeded in any case. Sums are split among threads, so their number must be that of the
    other run: OMP_NUM_THREADS, or as many as torch takes on such a machine.
    """
    if device.type != "cpu":
        raise ConfigError(
            "deterministic is held on the CPU alone, and a GPU was taken: kernels there add up in the order in which "
            "threads come; set device to cpu (in rl: trainer.device), or leave deterministic out"
        )
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads())  # once it was said, MKL takes that many and not fewer as it likes
