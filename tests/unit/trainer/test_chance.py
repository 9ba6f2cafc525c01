import random

import msgspec
import numpy as np
import torch

from prime_rl.trainer.chance import Chance, chance_now, set_chance

CPU = torch.device("cpu")


def drawn() -> list[float]:
    return [torch.rand(()).item(), np.random.random(), np.random.normal(), random.random(), random.gauss(0, 1)]


def test_every_generator_goes_on_where_it_was_also_in_the_middle_of_a_pair():
    random.gauss(0, 1)
    np.random.normal()
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(chance_now(CPU)), type=Chance)
    expected = drawn()
    assert drawn() != expected
    set_chance(stored, CPU)
    assert drawn() == expected
