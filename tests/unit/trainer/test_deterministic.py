from collections.abc import Iterator

import pytest
import torch

from prime_rl.errors import ConfigError
from prime_rl.trainer.deterministic import make_deterministic


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_torch_is_told_and_computes_with_as_many_threads_as_before():
    threads = torch.get_num_threads()
    make_deterministic(torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads


def test_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"set device to cpu \(in rl: trainer.device\)"):
        make_deterministic(torch.device("cuda", 0))
    assert not torch.are_deterministic_algorithms_enabled()
