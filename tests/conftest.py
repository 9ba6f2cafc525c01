import os
import shutil
import socket

import pytest

from prime_rl.models.native import Kernels, load_kernels


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The CPU kernels. A machine without a C compiler has none; with one, a build that fails is a failure."""
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang")):
        pytest.skip("this machine has no C compiler, and runs on torch alone")
    loaded = load_kernels()
    assert loaded is not None, "there is a C compiler, but the kernels were not built: see the log"
    loaded.use_torch_threads()
    return loaded
