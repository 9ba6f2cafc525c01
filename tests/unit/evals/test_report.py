import io
import json
import math
from itertools import combinations

import msgspec
import pytest
from rich.console import Console

from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn
from prime_rl.evals.report import (
    Outcome,
    failures_text,
    make_report,
    pass_at_k,
    report_json,
    report_table,
    result_line,
    table_text,
)


def rollout_of(example, reward, *, failure=None, tokens=4, truncated=False):
    turn = Turn(prompt_ids=[1], completion_ids=[2] * tokens, logprobs=[-1.0] * tokens, versions=[0] * tokens)
    return Rollout(id=0, env="e", example=example, reward=reward, failure=failure, turns=[turn], truncated=truncated)


def report_of(rollouts, k):
    outcomes = [Outcome.of(rollout) for rollout in rollouts]
    return make_report(outcomes, env="e", step=3, rollouts_per_example=k, seconds=1.5, retries=1)


@pytest.mark.parametrize(("num", "num_right"), [(n, c) for n in range(1, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(num, num_right):
    rollouts = [True] * num_right + [False] * (num - num_right)
    for k in range(1, num + 1):
        draws = list(combinations(rollouts, k))
        assert pass_at_k(num, num_right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_binary_rewards_give_avg_and_pass_at_powers_of_two():
    rewards = [(0, 1), (0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (1, 0), (1, 0)]
    report = report_of([rollout_of(example, reward) for example, reward in rewards], k=4)
    assert report.avg == 3 / 8
    assert report.pass_at == {1: 3 / 8, 2: pytest.approx((0.5 + 5 / 6) / 2), 4: 1.0}
    assert report.num_examples == 2


def test_graded_rewards_have_no_pass_at_k():
    report = report_of([rollout_of(0, 0.5), rollout_of(0, 1)], k=2)
    assert report.avg == 0.75
    assert report.pass_at == {}


def test_failed_rollouts_are_in_no_figure_but_are_counted_by_kind():
    failure = Failure(kind=FailureKind.TIMEOUT, message="slow")
    rollouts = [rollout_of(0, 1.0), rollout_of(0, math.nan, failure=failure, tokens=100), rollout_of(1, 0.0)]
    report = report_of(rollouts, k=2)
    assert report.avg == 0.5
    assert report.errors == {"timeout": 1}
    assert report.completion_len == 4
    assert report.pass_at == {1: 0.5}, "no example has two rollouts that did not fail"
    assert report.num_rollouts == 3
    metrics = report.metrics()
    assert (metrics["eval/e/errors"], metrics["eval/e/errors/timeout"], metrics["eval/e/retries"]) == (1, 1, 1)
    assert failures_text(report) == "1 of 3 rollouts of e failed: 1 timeout (timeout: slow)"


def test_the_files_hold_the_figures_and_every_rollout():
    failure = Failure(kind=FailureKind.SCORER, type="KeyError", message="'x'")
    rollouts = [rollout_of(0, 1.0, truncated=True), rollout_of(1, math.nan, failure=failure)]
    report = json.loads(report_json(report_of(rollouts, k=1)))
    assert (report["env"], report["step"], report["avg"], report["errors"]) == ("e", 3, 1.0, {"scorer": 1})
    rows = [json.loads(result_line(rollout)) for rollout in rollouts]
    assert [row["reward"] for row in rows] == [1.0, None]
    assert rows[1]["failure"] == "scorer: KeyError: 'x'"
    assert rows[0]["truncated"]


def test_the_table_names_the_base_and_shows_errors():
    failure = Failure(kind=FailureKind.SCORER, message="x")
    report = report_of([rollout_of(0, 1.0), rollout_of(0, math.nan, failure=failure)], k=2)
    console = Console(width=140, file=io.StringIO())
    console.print(report_table([report], base_step=3))
    text = console.file.getvalue()
    assert "base" in text
    assert "1 scorer" in text
    assert "1.0000" in text


def test_an_evaluation_that_spans_versions_of_the_weights_says_which():
    first, last = rollout_of(0, 1.0), rollout_of(0, 0.0)
    newer = [msgspec.structs.replace(turn, versions=(3, 3, 4, 5)) for turn in last.turns]
    older = [msgspec.structs.replace(turn, versions=(3, 3, 3, 3)) for turn in first.turns]
    first, last = (msgspec.structs.replace(one, turns=turns) for one, turns in ((first, older), (last, newer)))
    report = report_of([first, last], k=2)
    assert report.versions == (3, 5)
    assert (report.metrics("val")["val/e/version/min"], report.metrics("val")["val/e/version/max"]) == (3, 5)
    assert "step_3-5" in table_text([report])
    assert "base " in table_text([report_of([first], k=1)], base_step=3)
