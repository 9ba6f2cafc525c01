import json
from dataclasses import replace

import pytest

from prime_rl.environments.rollouts import FailureKind, Rollout, Turn
from prime_rl.environments.trajectories import training_samples
from prime_rl.orchestrator.groups import Counters, Dispatch, End, Ended, Example
from prime_rl.orchestrator.metrics import (
    Clock,
    EndTally,
    Progress,
    batch_metrics,
    log_line,
    progress_metrics,
    readable_rollouts,
    too_long_warning,
)
from prime_rl.orchestrator.scoring import ScoredRollout

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
    groups = [[scored(1.0), scored(1.0)], [scored(0.0), scored(1.0)], [scored(0.5), scored(0.5)]]
    metrics = metrics_of(groups)
    assert metrics["batch/zero_variance"] == pytest.approx(2 / 3)
    assert metrics["batch/effective_batch_size"] == pytest.approx(1 / 3), "the others have no advantage"
    assert (metrics["batch/solve_all"], metrics["batch/solve_none"]) == (pytest.approx(1 / 3), 0)


def test_a_rollout_that_several_filters_find_is_found_once():
    found = [replace(scored(1.0), detected=names) for names in (("gibberish", "repetition"), ("gibberish",), (), ())]
    assert metrics_of([found])["filter/total_detected_rate"] == 0.5


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


def test_what_is_told_of_all_is_told_of_each_environment():
    rows = [
        scored(1.0, env="a", tokens=6, metrics={"words": 2.0}, advantage=0.5),
        scored(0.0, env="a", tokens=2, versions=[3, 6], truncated=True, metrics={"words": 4.0}, advantage=-0.5),
    ]
    others = [scored(1.0, env="b", metrics={"words": 9.0}), scored(1.0, env="b", metrics={"words": 9.0})]
    metrics = metrics_of([rows, others])
    assert (metrics["batch/a"], metrics["batch/b"]) == (0.5, 0.5)
    assert (metrics["reward/a/min"], metrics["reward/a/mean"], metrics["reward/b/mean"]) == (0.0, 0.5, 1.0)
    assert (metrics["completion_len/a/mean"], metrics["completion_len/b/mean"]) == (4, 4)
    assert (metrics["seq_len/a/max"], metrics["prompt_len/b/mean"], metrics["num_turns/a/mean"]) == (8, 2, 1)
    assert (metrics["is_truncated/a/mean"], metrics["is_truncated/b/mean"]) == (0.5, 0.0)
    assert metrics["off_policy_gap/a/mean"] == pytest.approx((6 * 1 + 3 + 0) / 8)
    assert (metrics["off_policy_gap/a/max"], metrics["off_policy_gap/b/max"]) == (3, 1)
    assert (metrics["metrics/a/words/mean"], metrics["metrics/b/words/mean"]) == (3.0, 9.0)
    assert (metrics["advantage/a/max"], metrics["advantage/b/max"]) == (0.5, 0.0)
    assert metrics["time/rollout/b/total/mean"] == 1.5
    assert metrics["stop_reason/stop"] == 1.0


def test_groups_that_are_solved_always_or_never_are_counted_apart():
    groups = [[scored(1.0), scored(1.0)], [scored(0.0), scored(1.0)], [scored(0.0)] * 2, [scored(0.5)] * 2]
    metrics = metrics_of(groups)
    assert (metrics["batch/solve_all"], metrics["batch/solve_none"]) == (0.25, 0.25)
    assert metrics["batch/zero_variance"] == 0.75


def split_in(env, *prompts):
    turns = [Turn(prompt_ids=ids, completion_ids=[3], logprobs=[-1.0], versions=[5]) for ids in prompts]
    rollout = Rollout(id=1, env=env, example=9, turns=turns, reward=1.0)
    samples = training_samples(rollout, advantage=0.0, temperature=1.0)
    return ScoredRollout(rollout=rollout, advantage=0.0, samples=samples)


def test_turns_that_do_not_extend_what_was_before_them_are_counted_and_shown():
    groups = [[split_in("a", [1], [1, 3, 4], [1, 4], [2])], [split_in("b", [1], [1, 3, 4])]]
    metrics = metrics_of(groups)
    assert (metrics["trajectory/splits"], metrics["trajectory/a/splits"], metrics["trajectory/b/splits"]) == (2, 2, 0)
    assert log_line(6, metrics).endswith(" | Off-Policy Gap: 1 | Splits: 2")
    assert "trajectory/splits" not in metrics_of(groups, strategy="branching")


def ended(env, kind, why=""):
    dispatch = Dispatch(
        rollout_id=1, group=0, place=0, example=Example(env=env, index=0), version=0, batch=0, attempt=1
    )
    return Ended(dispatch=dispatch, end=End(kind=kind, why=why), batch=0)


def test_ends_are_counted_for_each_environment_since_the_last_row():
    tally = EndTally()
    for one in [("a", "used"), ("a", "used"), ("a", "failed", "timeout"), ("a", "filtered", "easy")]:
        tally.note(ended(*one))
    tally.note(ended("b", "cancelled", "stale"))
    assert tally.take() == {
        **{"rollouts/a/used": 2, "rollouts/a/failed": 1, "rollouts/a/filtered": 1, "rollouts/a/cancelled": 0},
        **{"rollouts/a/failed/timeout": 1, "rollouts/a/filtered/easy": 1, "rollouts/a/error_rate": 0.25},
        **{"rollouts/b/used": 0, "rollouts/b/failed": 0, "rollouts/b/filtered": 0, "rollouts/b/cancelled": 1},
        **{"rollouts/b/cancelled/stale": 1, "rollouts/b/error_rate": 0.0},
        **{"rollouts/left_out_rate": 1 / 3, "rollouts/too_long_rate": 0.0},
    }
    assert tally.take() == {}


def test_when_more_than_a_tenth_is_left_out_as_too_long_that_is_told_and_the_log_line_has_all_that_is_left_out():
    for num_long, told in ((10, False), (30, True)):
        tally = EndTally()
        for _ in range(100 - num_long - 15):
            tally.note(ended("a", "used"))
        for _ in range(num_long):
            tally.note(ended("b", "filtered", "too_long"))
        for one in [("b", "filtered", "gibberish")] * 15 + [("b", "failed", "timeout")] * 50:
            tally.note(ended(*one))
        metrics = tally.take()
        assert metrics["rollouts/too_long_rate"] == num_long / 100
        warning = too_long_warning(metrics, 64)
        assert warning.startswith("30% of the rollouts since the last batch are longer than seq_len = 64") == told
        assert bool(warning) == told
        line = log_line(6, metrics_of([[scored(0.25)]]) | metrics)
        assert line.endswith(f" | Left Out: {num_long + 15}%")


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
