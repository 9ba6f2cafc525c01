import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.doubles.ranks import on_ranks

from prime_rl import activity
from prime_rl.errors import ConfigError
from prime_rl.trainer import ranks as module
from prime_rl.trainer.ranks import ALONE, Ranks, joined

CPU = torch.device("cpu")


def test_a_process_alone_is_its_own_leader_and_needs_no_group():
    with joined(lambda: CPU, timeout=1) as ranks:
        assert ranks == ALONE
        assert ranks.is_leader
        ranks.tell("anything")
        assert ranks.gathered({"a": 1}) == [{"a": 1}]
    assert not torch.distributed.is_initialized()


def test_a_process_alone_can_have_a_group_which_is_left_at_the_end():
    with joined(lambda: CPU, timeout=60, always=True) as ranks:
        assert torch.distributed.get_world_size() == ranks.size == 1
        assert ranks.gathered("x") == ["x"]
    assert not torch.distributed.is_initialized()


def test_ranks_that_cannot_meet_are_told_how_they_would(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but MASTER_ADDR is not set.*torchrun"),
        joined(lambda: CPU, timeout=1),
    ):
        pass


def test_a_rank_without_a_gpu_of_its_own_is_told_how_many_there_are(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ConfigError, match="rank 1 is number 1 on this machine, which has 1 visible GPUs"),
        joined(lambda: torch.device("cuda"), timeout=1),
    ):
        pass


def talk(ranks: Ranks) -> tuple[list[str], list[int], str]:
    words = ["one", "two"] if ranks.is_leader else [ranks.hear(), ranks.hear()]
    if ranks.is_leader:
        for word in words:
            ranks.tell(word)
    return words, ranks.gathered(ranks.rank * 10), ranks.told("reading", lambda: f"of {ranks.rank}")


def test_all_hear_what_the_first_one_tells_and_know_what_all_have():
    assert on_ranks(3, talk) == [(["one", "two"], [0, 10, 20], "of 0")] * 3


LIMIT_S = 3.0


def wait_for_a_reader(ranks: Ranks) -> tuple[str, str]:
    """What rank 0 reads, for longer than anybody waits for a word; once getting on with it, and once not."""
    module.STALLED_S = 1.0
    patient = replace(
        ranks, sign_s=LIMIT_S / 3, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
    )

    def read(beat: Callable[[], None]) -> str:
        end = time.monotonic() + LIMIT_S + 1
        while time.monotonic() < end:
            beat()
            time.sleep(0.05)
        return "read"

    found = patient.told("reading", lambda: read(activity.beat))
    try:
        return found, patient.told("reading", lambda: read(lambda: None))
    except RuntimeError as error:
        return found, type(error).__name__


def test_ranks_wait_for_the_first_one_for_as_long_as_it_gets_on():
    leader, other = on_ranks(2, wait_for_a_reader)
    assert leader[0] == other[0] == "read"
    assert other[1] != "read"


@pytest.mark.parametrize(("timeout", "sign_s"), [(3, 1.0), (600, 5.0)])
def test_signs_of_life_come_before_anybody_gives_up(timeout, sign_s):
    with joined(lambda: CPU, timeout=timeout, always=True) as ranks:
        assert ranks.sign_s == sign_s


def leave_the_reader(ranks: Ranks) -> list[str]:
    """What rank 0 says of the other one, which is gone while it reads."""
    said: list[str] = []
    threading.excepthook = lambda arguments: said.append(f"in a thread: {arguments.exc_value}")
    if ranks.is_leader:
        try:
            replace(ranks, sign_s=0.1).told("reading", lambda: time.sleep(2))
        except RuntimeError as error:
            said.append(type(error).__name__)
    return said


def test_that_a_rank_is_lost_while_the_first_one_reads_is_said_once():
    leader, _ = on_ranks(2, leave_the_reader)
    assert leader == ["RuntimeError"]
