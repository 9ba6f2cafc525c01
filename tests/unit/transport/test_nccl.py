import threading

import pytest
import torch

from prime_rl.errors import ConfigError, DeadlineExceeded, InferenceError
from prime_rl.transport import nccl
from prime_rl.transport.nccl import NcclSender, _Call

NEVER = lambda: False  # noqa: E731


def sender(device="cuda", **changes):
    options = {"host": "localhost", "port": 1, "world_size": 2, "timeout": 0.05, **changes}
    return NcclSender(device=torch.device(device), **options)


def test_a_trainer_without_a_gpu_is_told_what_to_set():
    with pytest.raises(ConfigError, match="the trainer runs on cpu; set it to filesystem"):
        sender("cpu")


def test_a_trainer_without_vllm_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prime-rl\[vllm\]'"):
        sender()


def test_a_group_that_cannot_be_formed_says_why_and_where(monkeypatch):
    def refuse(self):
        raise OSError("address already in use")

    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(NcclSender, "_form", refuse)
    opening = sender(port=29501)
    with pytest.raises(InferenceError, match=r"meet at localhost:29501 \(.*2 GPUs.*OSError: address already in use"):
        opening.open(NEVER)
    with pytest.raises(InferenceError, match="address already in use"):
        opening.check()
    opening.close()


def test_a_call_that_hangs_ends_at_its_deadline_or_when_it_is_given_up():
    blocked = threading.Event()
    call = _Call(blocked.wait, "hangs")
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s \(weight_broadcast\.timeout\) for the servers"):
        call.wait(0.01, "the servers", NEVER)
    call.wait(60, "the servers", lambda: True)
    blocked.set()
    call.wait(60, "the servers", NEVER)
