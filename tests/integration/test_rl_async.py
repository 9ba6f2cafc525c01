"""What asynchrony promises: none at level 0 (`test_trainer_ranks.py`, too), a bound above it, and time gained."""

import pytest

from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.monitors.base import read_metrics


def finish(run) -> None:
    out, err = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, out + err


@pytest.mark.slow
def test_at_level_0_every_token_is_sampled_by_the_weights_it_trains(start_rl):
    run = start_rl("--max-async-level", "0", "--trainer.optim.lr", "1e-2", steps=6)
    finish(run)
    trainer = read_metrics(run.paths.metrics("trainer"))
    assert len(trainer) == 6
    assert max(row["mismatch_kl/mean"] for row in trainer) <= 1e-6
    assert max(row["mismatch_kl/max"] for row in trainer) <= 1e-6
    batches = read_metrics(run.paths.metrics("orchestrator"))
    assert {row["off_policy_gap/max"] for row in batches} == {0.0}
    assert {row["async_level"] for row in batches} == {0.0}


def test_at_level_2_no_token_is_older_than_the_bound(start_rl):
    run = start_rl("--max-async-level", "2", "--orchestrator.max-off-policy-steps", "1", steps=12)
    finish(run)
    gaps = [row["off_policy_gap/max"] for row in read_metrics(run.paths.metrics("orchestrator"))]
    bound = load(OrchestratorConfig, ["@", str(run.paths.config("orchestrator"))], {}).staleness_bound
    assert bound == 3
    assert len(gaps) == 12
    assert 1 <= max(gaps) <= bound  # it was asynchronous, and it was bounded


def test_at_level_1_the_next_batch_is_made_while_the_trainer_trains(start_rl):
    run = start_rl("--max-async-level", "1", "--trainer.debug.min-step-time", "1.0", steps=6)
    finish(run)
    trained_at = {row["step"]: row["time"] for row in read_metrics(run.paths.metrics("trainer"))}
    shipped_at = {row["step"]: row["time"] for row in read_metrics(run.paths.metrics("orchestrator"))}
    early = [step for step in range(5) if shipped_at[step + 1] < trained_at[step]]
    assert early == [0, 1, 2, 3, 4]
