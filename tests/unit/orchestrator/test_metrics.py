import json

import pytest

from prime_rl.environments.rollouts import FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import training_samples
from prime_rl.orchestrator.metrics import (
    Clock,
    Progress,
    ScoredRollout,
    batch_metrics,
    log_line,
    progress_metrics,
    readable_rollouts,
)
from prime_rl.orchestrator.scheduler import Counters

CLOCK = Clock(step_s=2.0, wait_for_weights_s=0.5, generate_s=1.0, update_weights_s=0.1)


def scored(reward, *, tokens=4, versions=None, env="e", truncated=False, metrics=None, advantage=0.0):
    turn = Turn(
        prompt_ids=[1, 2],
        completion_ids=[3] * tokens,
        logprobs=[-1.0] * tokens,
        versions=versions or [5] * tokens,
    )
    rollout = Rollout(
        id=1, env=env, example=9, turns=[turn], reward=reward, truncated=truncated, metrics=metrics or {},
        messages=[{"role": "user", "content": "hi"}], timings={"total": 1.5}, stop_reason="stop",
    )  # fmt: skip
    samples = training_samples(rollout, advantage=advantage, temperature=1.0)
    return ScoredRollout(rollout=rollout, advantage=advantage, samples=samples)


def metrics_of(groups, **fields):
    fields = {"step": 6, "async_level": 1, "clock": CLOCK, "failures": {}, "counters": Counters()} | fields
    return batch_metrics(groups, **fields)


def test_means_are_over_rollouts_and_the_gap_is_over_sampled_tokens():
    groups = [[scored(1.0, tokens=6), scored(0.0, tokens=2, versions=[3, 6], truncated=True)]]
    metrics = metrics_of(groups)
    assert metrics["reward/mean"] == 0.5
    assert metrics["seq_len/mean"] == 6
    assert metrics["completion_len/mean"] == 4
    assert metrics["completion_len/max"] == 6
    assert metrics["is_truncated/mean"] == 0.5
    assert metrics["off_policy_gap/mean"] == pytest.approx((6 * 1 + 3 + 0) / 8)
    assert metrics["off_policy_gap/max"] == 3
    assert metrics["async_level"] == 1
    assert metrics["perf/throughput"] == 4.0
    assert metrics["time/wait_for_weights"] == 0.5


def test_groups_whose_rewards_are_all_equal_are_counted():
    groups = [[scored(1.0), scored(1.0)], [scored(0.0), scored(1.0)]]
    assert metrics_of(groups)["batch/zero_variance"] == 0.5


def test_every_kind_of_failure_has_a_count_and_the_rate_is_of_all_that_ended():
    metrics = metrics_of([[scored(1.0)] * 3], failures={FailureKind.TIMEOUT: 1})
    assert {name for name in metrics if name.startswith("errors/")} == {
        "errors/rate",
        *(f"errors/{kind}" for kind in FailureKind),
    }
    assert metrics["errors/timeout"] == 1
    assert metrics["errors/scorer"] == 0
    assert metrics["errors/rate"] == 0.25


def test_environments_and_their_own_metrics_are_reported_apart():
    groups = [[scored(1.0, env="a", metrics={"words": 2.0})], [scored(0.0, env="b", metrics={"words": 4.0})]]
    metrics = metrics_of(groups)
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (1.0, 0.0)
    assert metrics["metrics/words/mean"] == 3.0


def test_totals_grow_over_the_run():
    progress = Progress()
    progress_metrics(progress, [[scored(1.0), scored(1.0)]])
    metrics = progress_metrics(progress, [[scored(1.0), scored(1.0)]])
    assert metrics == {"progress/total_samples": 4, "progress/total_problems": 2, "progress/total_tokens": 24}


def test_the_log_line_has_the_form_that_others_read():
    line = log_line(6, metrics_of([[scored(0.25)]]))
    assert line == (
        "Step 6 | Time: 2.00s | Reward: 0.2500 | Throughput: 2.0 tokens/s | Seq. Length: 6.0 tokens/sample | "
        "Async Level: 1 | Off-Policy Gap: 1"
    )


def test_readable_rollouts_are_one_json_object_a_line_with_their_group():
    groups = [[scored(1.0, advantage=0.5)], [scored(0.5, versions=[3, 4, 4, 5])]]
    rows = [json.loads(line) for line in readable_rollouts(groups).splitlines()]
    assert [row["group"] for row in rows] == [0, 1]
    assert rows[0]["advantage"] == 0.5
    assert rows[1]["versions"] == [3, 5]
    assert rows[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert rows[0]["timings"] == {"total": 1.5}
