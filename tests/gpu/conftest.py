"""For tests on a GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """Whatever a test took: later ones find the GPU empty, also other processes and behind a test that filled it."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
