import threading

import pytest
import torch

from prime_rl.errors import ArtifactError
from prime_rl.trainer.checkpoints.copies import Copy, HostBuffers, num_bytes


def state(value: float) -> dict:
    return {
        "model": {"a": torch.full((3, 2), value)},
        "optimizer": {"updates": 7, "state": {"a": {"m": torch.ones(4)}}},
    }


def test_a_copy_is_of_the_moment_and_stays_when_the_state_changes():
    live = state(1.0)
    copied = Copy(live, HostBuffers()).make()
    live["model"]["a"].add_(1)
    assert copied["model"]["a"].tolist() == [[1, 1]] * 3
    assert copied["optimizer"]["updates"] == 7
    assert num_bytes(copied) == (6 + 4) * 4


def test_the_loop_waits_until_all_is_copied_and_no_longer():
    copy = Copy(state(1.0), HostBuffers())
    passed = threading.Event()

    def loop() -> None:
        copy.wait_copied()
        passed.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    copy.make()
    assert passed.wait(30)
    copy.wait_copied()


def test_the_memory_is_used_again():
    buffers = HostBuffers()
    first = Copy(state(1.0), buffers).make()["model"]["a"]
    second = Copy(state(2.0), buffers).make()["model"]["a"]
    assert first.data_ptr() == second.data_ptr()
    assert second.tolist() == [[2, 2]] * 3


def test_no_memory_is_said_and_holds_up_nobody(monkeypatch):
    buffers = HostBuffers()

    def full(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(buffers, "like", full)
    copy = Copy(state(1.0), buffers)
    with pytest.raises(ArtifactError, match="cannot be copied for a checkpoint: no room"):
        copy.make()
    copy.wait_copied()
