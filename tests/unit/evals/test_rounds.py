import math
import sys

import pytest

from prime_rl.config.evals import EvalConfig, OnlineEvalConfig
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, Turn, WorkerReady
from prime_rl.errors import ConfigError, EnvironmentSetupError
from prime_rl.evals.rounds import Part, Round, Schedule, plan_part


def evaluated(schedule, versions):
    """Of the versions that are served one after the other, those at which an evaluation begins."""
    begun = []
    for version in versions:
        if schedule.is_due(version):
            schedule.begin(version)
            begun.append(version)
    return begun


@pytest.mark.parametrize(
    ("interval", "at_start", "last", "served", "expected"),
    [
        pytest.param(2, True, 5, range(6), [0, 2, 4, 5], id="base first, every two, and the last"),
        pytest.param(2, False, 4, range(5), [2, 4], id="without the base, and the last is a multiple"),
        pytest.param(10, True, 35, [0, 4, 9, 13, 19, 31, 35], [0, 13, 31, 35], id="versions that were passed by"),
        pytest.param(100, True, 7, range(8), [0, 7], id="an interval beyond the run"),
        pytest.param(100, False, None, range(150), [100], id="no end"),
        pytest.param(2, True, 5, [0, 0, 2, 2, 5, 5], [0, 2, 5], id="each version once"),
    ],
)
def test_what_is_evaluated_follows_from_interval_base_and_last_step(interval, at_start, last, served, expected):
    assert evaluated(Schedule(interval, at_start=at_start, last=last), served) == expected


def test_what_fell_due_while_another_ran_is_evaluated_once_with_what_is_served_then():
    schedule = Schedule(2, at_start=True, last=20)
    schedule.begin(0)  # and it goes on until weights 7 are served
    assert schedule.is_due(7)
    schedule.begin(7)
    assert not schedule.is_due(7)
    assert schedule.is_due(8)


def rollout_of(item, reward, *, version=0, kind=None):
    turn = Turn(prompt_ids=[1], completion_ids=[2] * 4, logprobs=[-1.0] * 4, versions=[version] * 4)
    failure = None if kind is None else Failure(kind=kind, message="x")
    return Rollout(id=item.number, env="e", example=item.example, reward=reward, failure=failure, turns=[turn])


PARTS = [
    Part(env="a", examples=range(3, 5), rollouts_per_example=2),
    Part(env="b", examples=range(1), rollouts_per_example=1),
]


def test_a_round_runs_every_example_of_every_environment_as_often_as_it_says_and_times_each_environment():
    round_ = Round(PARTS, step=4)
    items = []
    while round_.has_next:
        items.append(round_.next(now=float(len(items))))
    assert [(item.part, item.example) for item in items] == [(0, 3), (0, 3), (0, 4), (0, 4), (1, 0)]
    assert [item.number for item in items] == [0, 1, 2, 3, 0]
    for number, item in enumerate(reversed(items)):
        assert not round_.is_done
        round_.end(item, rollout_of(item, 1.0, version=4 + number // 4), now=10.0 + number)
    assert round_.is_done
    a, b = round_.reports()
    assert (a.env, a.step, a.num_examples, a.num_rollouts, a.avg, a.seconds) == ("a", 4, 2, 4, 1.0, 14.0)
    assert (b.env, b.num_rollouts, b.seconds) == ("b", 1, 6.0)
    assert a.versions == (4, 5)
    assert b.versions == (4, 4)
    assert [outcome.example for outcome in round_.outcomes(0)] == [3, 3, 4, 4]


def test_a_rollout_that_is_run_again_keeps_its_place_and_counts_its_attempts():
    round_ = Round(PARTS[1:], step=0)
    item = round_.next(now=0)
    assert not round_.has_next
    round_.again(item, counts=False)
    again = round_.next(now=1)
    assert again == item
    round_.again(again, counts=True)
    last = round_.next(now=2)
    assert last.attempt == 2
    assert not round_.is_done
    round_.end(last, rollout_of(last, 1.0), now=3)
    (report,) = round_.reports()
    assert (report.num_rollouts, report.retries) == (1, 2)


def test_of_a_rollout_that_ended_its_tokens_and_messages_are_not_kept():
    round_ = Round(PARTS[1:], step=0)
    item = round_.next(now=0)
    rollout = rollout_of(item, 1.0)
    (turn,) = rollout.turns
    before = sys.getrefcount(rollout), sys.getrefcount(turn), sys.getrefcount(turn.completion_ids)
    round_.end(item, rollout, now=1)
    assert before == (sys.getrefcount(rollout), sys.getrefcount(turn), sys.getrefcount(turn.completion_ids))
    assert round_.reports()[0].completion_len == 4


def test_a_failed_rollout_is_counted_apart_and_never_scored():
    round_ = Round(PARTS[:1], step=0)
    kinds = [None, FailureKind.TIMEOUT, None, FailureKind.SCORER]
    for kind in kinds:
        item = round_.next(now=0)
        round_.end(item, rollout_of(item, 1.0 if kind is None else math.nan, kind=kind), now=1)
    (report,) = round_.reports()
    assert report.avg == 1.0
    assert report.errors == {"timeout": 1, "scorer": 1}
    assert report.pass_at == {1: 1.0}


def size(num_eval, has_eval_split=True):
    return WorkerReady(num_train=5, num_eval=num_eval, has_eval_split=has_eval_split)


@pytest.mark.parametrize("kind", [EvalConfig, OnlineEvalConfig])
def test_an_environment_may_say_of_itself_what_is_evaluated(kind):
    config = kind(
        num_examples=4,
        rollouts_per_example=3,
        env=[{"id": "a"}, {"id": "b", "num_examples": -1, "rollouts_per_example": 2, "skip_first": 2}],
    )
    a, b = (plan_part(env, config, size(6)) for env in config.env)
    assert a == Part(env="a", examples=range(4), rollouts_per_example=3)
    assert b == Part(env="b", examples=range(2, 6), rollouts_per_example=2)


def test_nothing_to_evaluate_is_refused_in_words_and_training_examples_are_told(caplog):
    config = OnlineEvalConfig(env=[{"id": "a", "skip_first": 6}])
    with pytest.raises(EnvironmentSetupError, match="'a' has no evaluation examples"):
        plan_part(config.env[0], config, size(0))
    with pytest.raises(ConfigError, match="skip_first = 6 leaves none of the 6 evaluation examples"):
        plan_part(config.env[0], config, size(6))
    with caplog.at_level("WARNING", logger="prime_rl"):
        plan_part(config.env[0], config, size(7, has_eval_split=False))
    assert "on the examples that it trains on" in caplog.text
