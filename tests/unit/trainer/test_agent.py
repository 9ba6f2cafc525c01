"""What `rl` is told of ranks that a signal ended; whole runs are in tests/integration."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from prime_rl.errors import FINAL
from prime_rl.trainer import agent
from prime_rl.trainer.agent import main, unsaid


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


@pytest.mark.parametrize(("codes", "expected"), [((3, -15), FINAL), ((1, -15), 1), ((-9, -15), 1)])
def test_an_error_of_a_rank_that_no_restart_mends_is_one_of_the_trainer(monkeypatch, tmp_path, codes, expected):
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(tmp_path / "none"))
        for rank, code in enumerate(codes)
    }

    def run(arguments):
        raise ChildFailedError("trainer", failures)

    monkeypatch.setattr(agent, "run", run)
    monkeypatch.setattr(agent.SubprocessContext, "close", agent.SubprocessContext.close)
    monkeypatch.setattr(agent.logging, "disable", lambda level: None)
    assert main(["--nproc-per-node", "2", "x.py"]) == expected
