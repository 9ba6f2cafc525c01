"""Several ranks, as they are really started: by `rl`, and by `torchrun` on two nodes (two agents on loopback)."""

import os
import signal
import time

import psutil
import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.transport.manifest import latest_step
from tests.integration.test_rl_kills import gone

TWO_RANKS = ("--trainer-gpu-ids", "0,1", "--trainer.device", "cpu")


def test_rl_trains_over_two_ranks_and_serves_what_they_publish(sharded):
    """At level 0 every token is sampled by the weights it trains, so logprobs agree only if these arrived whole."""
    trainer = read_metrics(sharded.metrics("trainer"))
    assert [row["step"] for row in trainer] == [0, 1, 2, 3]
    assert max(row["mismatch_kl/max"] for row in trainer) <= 1e-6
    batches = read_metrics(sharded.metrics("orchestrator"))
    assert {(row["off_policy_gap/max"], row["async_level"]) for row in batches} == {(0.0, 0.0)}
    assert latest_step(sharded.weights) == 4
    assert sharded.log("trainer").read_text().count("Step 3 | Time: ") == 1, "the first rank alone speaks"
    assert "initialised at random" in sharded.rank_log("trainer", 1).read_text(), "others only warn"


@pytest.mark.slow
def test_two_nodes_train_what_one_process_does(nodes):
    one, two = (read_metrics(run.metrics("trainer")) for run in (nodes.alone, nodes.together))
    assert len(one) == len(two) == 3
    for key in ("loss/mean", "optim/grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=1e-5)
    assert [row["progress/tokens"] for row in two] == [row["progress/tokens"] for row in one]
    assert ["Step 2 | Time: " in said for said in nodes.said] == [True, False]


@pytest.mark.slow
def test_when_a_rank_is_killed_the_run_ends_and_names_it(start_rl):
    run = start_rl(*TWO_RANKS, "--no-supervise")
    run.await_steps(1)
    family = run.family()
    ranks = [child for child in run.children()["trainer"].children() if "prime_rl.cli" in child.cmdline()]
    second = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
    killed_at = time.monotonic()
    os.kill(second.pid, signal.SIGKILL)
    assert run.process.wait(timeout=15) == 1
    assert time.monotonic() - killed_at < 10
    assert run.process.stderr is not None
    assert "rl: trainer ended with exit code 1: rank 1 was killed by SIGKILL" in run.process.stderr.read()
    assert gone(family)
    run.assert_nothing_half_written()


@pytest.mark.slow
def test_when_the_launcher_is_killed_no_rank_is_left(start_rl):
    run = start_rl(*TWO_RANKS)
    run.await_steps(1)
    family = run.family()
    run.process.kill()
    run.process.wait()
    left = psutil.wait_procs(family, timeout=15)[1]
    assert gone(left)
