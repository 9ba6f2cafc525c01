"""The generators of random numbers of a rank, so that a run that goes on draws what it would have drawn."""

import random

import msgspec
import numpy as np
import torch


class Chance(msgspec.Struct, frozen=True, kw_only=True):
    """States of this process's generators: torch's, that of its GPU, numpy's and Python's own."""

    torch_cpu: bytes
    torch_cuda: bytes | None
    """None without a GPU."""
    numpy_words: bytes
    """Of the Mersenne Twister, little-endian."""
    numpy_rest: tuple[int, int, float]
    """Position in the words; whether half of a pair of normal numbers is kept, and which."""
    python_words: tuple[int, ...]
    python_rest: tuple[int, float | None]
    """Version, and the kept half of a pair."""


def chance_now(device: torch.device) -> Chance:
    """`device`: of this rank."""
    name, words, *rest = np.random.get_state()
    assert name == "MT19937", name
    version, python_words, kept = random.getstate()
    return Chance(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
        numpy_words=np.asarray(words).astype("<u4").tobytes(),
        numpy_rest=(int(rest[0]), int(rest[1]), float(rest[2])),
        python_words=python_words,
        python_rest=(version, kept),
    )


def set_chance(chance: Chance, device: torch.device) -> None:
    """Have this process draw from where `chance` was taken. A GPU's state is left alone where there was none."""
    torch.set_rng_state(_tensor(chance.torch_cpu))
    if device.type == "cuda" and chance.torch_cuda is not None:
        torch.cuda.set_rng_state(_tensor(chance.torch_cuda), device)
    words = np.frombuffer(chance.numpy_words, "<u4")
    np.random.set_state(("MT19937", words, *chance.numpy_rest))
    version, kept = chance.python_rest
    random.setstate((version, chance.python_words, kept))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
