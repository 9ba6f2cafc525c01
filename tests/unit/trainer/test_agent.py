"""What `rl` is told of ranks that a signal ended; whole runs are in tests/integration."""

import pytest

from prime_rl.trainer.agent import unsaid


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param({0: -15, 1: 1}, None, id="a rank has said why"),
        pytest.param({0: -15, 2: -11}, "rank 2 was killed by SIGSEGV", id="the others were ended by torchrun"),
        pytest.param({0: -15, 1: -15}, "rank 0 was killed by SIGTERM", id="somebody ended them"),
    ],
)
def test_a_rank_that_could_not_say_why_it_ended_is_named(codes, expected):
    assert unsaid(codes) == expected


def test_a_rank_that_was_killed_probably_had_no_memory():
    assert unsaid({3: -9}).startswith("rank 3 was killed by SIGKILL; if nobody did that, the machine ran out of memory")
