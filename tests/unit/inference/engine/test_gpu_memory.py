import pytest
import torch

from prime_rl.errors import ConfigError
from prime_rl.inference.engine.gpu_memory import (
    GIB,
    HEADROOM_BYTES,
    OUTSIDE_BYTES,
    cache_bytes,
    explained,
    limit_memory,
)

GPU = torch.device("cuda", 0)


class Card:
    """What the functions ask of a GPU of 80 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float, reserved: float = 0.0) -> None:
        self.fraction: float | None = None
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(free * GIB), 80 * GIB))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: int(reserved * GIB))
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
        monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", self._limit)

    def _limit(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction


def test_the_share_is_of_the_whole_card_and_holds_what_lies_outside_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch, free=79.0)
    assert limit_memory(GPU, 0.5) == 40 * GIB - OUTSIDE_BYTES
    assert card.fraction == (40 * GIB - OUTSIDE_BYTES) / (80 * GIB)


def test_another_process_may_hold_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=33.0)
    assert limit_memory(GPU, 0.4) == 32 * GIB - OUTSIDE_BYTES
    with pytest.raises(ConfigError, match=r"0.5 of 80.0 GiB are 40.0 GiB, and 33.0 GiB of the GPU are free; lower it"):
        limit_memory(GPU, 0.5)


def test_a_share_that_holds_no_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=79.0)
    with pytest.raises(ConfigError, match=r"0.01 leaves 0.80 GiB, less than the 1.5 GiB that any server needs"):
        limit_memory(GPU, 0.01)


def test_the_cache_takes_what_weights_and_workspace_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=60.0, reserved=10.0)
    assert cache_bytes(GPU, 30 * GIB, 0.4) == 20 * GIB - HEADROOM_BYTES
    with pytest.raises(ConfigError, match=r"take 10.0 GiB, and inference.gpu_memory_utilization = 0.1 leaves nothing"):
        cache_bytes(GPU, 10 * GIB, 0.1)


def test_running_out_of_memory_names_the_keys() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"ran out while loading the model: raise .*gpu_memory_utilization.*\(no room\)"
        ),
        explained("loading the model"),
    ):
        raise torch.OutOfMemoryError("no room\ndetails")
