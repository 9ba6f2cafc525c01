import threading
import time

import pytest
import torch

from prime_rl.errors import ArtifactError, DeadlineExceeded
from prime_rl.transport.broadcasts import announce, fall_back, fallback_reason, ready_file, wait_until_ready
from prime_rl.transport.checksum import entries
from prime_rl.transport.manifest import complete_steps, read_manifest
from prime_rl.transport.weights import load_weights, published


def weights(value=0.0):
    return published("nccl", entries({"b": torch.full((2, 3), value), "a": torch.zeros(1, dtype=torch.bfloat16)}))


def test_an_announcement_names_every_tensor_in_sending_order_and_holds_none(tmp_path):
    directory = announce(tmp_path, 3, weights())
    manifest = read_manifest(directory)
    assert (manifest.step, manifest.files, manifest.weights) == (3, {}, weights())
    assert list(manifest.weights.tensors) == ["b", "a"]
    with pytest.raises(ArtifactError, match="announces a transfer from GPU to GPU"):
        load_weights(directory)


def test_older_announcements_go_with_their_ready_files(tmp_path):
    for step in (1, 2, 3, 4):
        announce(tmp_path, step, weights(step))
        ready_file(tmp_path, step).touch()
    assert complete_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ready_3", "ready_4", "step_3", "step_4"]


def test_the_trainer_waits_for_the_servers(tmp_path):
    announce(tmp_path, 1, weights())
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            ready_file(tmp_path, 1).touch()

    assert wait_until_ready(tmp_path, 1, timeout=60, sleep=sleep)
    assert slept == [0.005] * 3


def test_it_stops_waiting_when_somebody_gives_up(tmp_path):
    announce(tmp_path, 1, weights())
    threading.Timer(0.05, fall_back, (tmp_path, "a server was lost")).start()
    assert not wait_until_ready(tmp_path, 1, timeout=60)
    ready_file(tmp_path, 1).touch()
    assert not wait_until_ready(tmp_path, 1, timeout=60)


def test_a_wait_without_an_answer_ends_and_says_for_what(tmp_path):
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"ready to receive weights 7 within 0\.02 s \(weight_broadcast\.timeout"
    ):
        wait_until_ready(tmp_path, 7, timeout=0.02)
    assert time.monotonic() - start < 5


def test_the_first_reason_to_give_up_stays(tmp_path):
    root = tmp_path / "broadcasts"
    assert fallback_reason(root) is None
    fall_back(root, "first")
    fall_back(root, "second")
    assert fallback_reason(root) == "first"
