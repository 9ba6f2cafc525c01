import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prime_rl.models.native import Kernels, load_kernels


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def workers_import_the_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts find the package `tests`."""
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """The CPU kernels, with two threads, so that work is divided on every machine.

    A machine without a C compiler has none; with one, a build that fails is a failure.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang")):
        pytest.skip("this machine has no C compiler, and runs on torch alone")
    loaded = load_kernels()
    assert loaded is not None, "there is a C compiler, but the kernels were not built: see the log"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    loaded.use_torch_threads()
    yield loaded
    torch.set_num_threads(num_threads)
    loaded.use_torch_threads()
