"""What asynchrony promises: none at level 0, a bound above it, and time gained."""

import time

import pytest

from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.monitors.base import read_metrics


def finish(run) -> None:
    out, err = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, out + err


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


@pytest.mark.slow
def test_generation_and_training_overlap_at_level_1(tmp_path_factory, start_rl):
    """20 steps with an environment that waits 1 s and a trainer step of 1 s: at most 0.65 of the time of level 0."""
    seconds = {}
    for level in (0, 1):
        out = tmp_path_factory.mktemp(f"level{level}")
        run = start_rl(
            *("--max-async-level", str(level), "--output-dir", str(out)),
            *("--orchestrator.env.id", "waiting-env", "--orchestrator.env.args", '{"wait_s": 1.0}'),
            *("--trainer.debug.min-step-time", "1.0"),
            steps=20,
        )
        run.paths = type(run.paths)(out)
        run.await_steps(1)
        first = time.monotonic()
        finish(run)
        seconds[level] = time.monotonic() - first
    assert seconds[1] <= 0.65 * seconds[0], seconds
