"""The loops of the orchestrator over stand-ins for everything around them, at random timings."""

import asyncio
import math
import random
from functools import partial

import pytest
from tests.doubles.loops import build, too_long

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Failure, FailureKind, Turn
from prime_rl.errors import ConfigError, Hopeless
from prime_rl.orchestrator import orchestrator as loops
from prime_rl.orchestrator import scheduler
from prime_rl.orchestrator.dispatch import Job
from prime_rl.orchestrator.state import EvaluationState

DEADLINE_S = 120.0
"""For a run of a second. Nothing wakes a loop that nobody woke: in these tests no notice is due."""


@pytest.fixture(autouse=True)
def _no_notices(monkeypatch):
    monkeypatch.setattr(loops, "NOTICE_INTERVAL_S", math.inf)


def config_of(tmp_path, **fields):
    fields = {"batch_size": 4, "rollouts_per_example": 2, "max_steps": 4, "env": [{"id": "a"}]} | fields
    return OrchestratorConfig.model_validate(
        {
            "client": {"base_url": "http://127.0.0.1:1/v1"},
            "model": {"name": "none"},
            "output_dir": tmp_path / "run",
            "seq_len": 64,
            **fields,
        }
    )


async def run(orchestrator):
    async with asyncio.timeout(DEADLINE_S):
        await orchestrator.run()


async def why_it_ended(orchestrator):
    try:
        await run(orchestrator)
    except Hopeless as error:
        return str(error)
    return ""


def random_outcomes(choose):
    """Rollouts fail, are too long, or get a reward, in proportions of this run."""
    failing = choose.choice([0.0, 0.0, 0.1, 0.4])
    long = choose.choice([0.0, 0.2, 0.6, 1.0])
    right = choose.choice([0.0, 0.5, 0.5, 0.9, 1.0])

    def outcome(request):
        if choose.random() < failing:
            kind, is_own = choose.choice([FailureKind.TIMEOUT, FailureKind.WORKER_DIED]), choose.random() < 0.7
            return {"failure": Failure(kind=kind, message="at random", is_own=is_own)}
        return {"reward": float(choose.random() < right)} | (too_long(request) if choose.random() < long else {})

    return outcome


def a_random_run(seed, tmp_path):
    """Its configuration and outcomes follow from the seed."""
    choose = random.Random(f"loops/{seed}")
    group, groups = choose.randint(1, 3), choose.randint(1, 3)
    fields = {
        "rollouts_per_example": group,
        "batch_size": group * groups,
        "max_steps": choose.randint(1, 4),
        "max_async_level": choose.randint(0, 2),
        "max_off_policy_steps": choose.choice([0, 1, 8]),
        "strict_async_level": choose.random() < 0.2,
        "oversampling_factor": choose.choice([1.0, 1.0, 1.5]),
        "max_attempts": choose.randint(1, 3),
        "max_error_rate": 1.0,
        "max_concurrent": choose.choice([None, None, group * 2]),
        "buffer": {"online_difficulty_filtering": choose.random() < 0.3},
        "filters": [{"type": "zero_advantage", "enforce": choose.random() < 0.5}],
        "env": [{"id": "a"}, {"id": "b"}][: choose.randint(1, 2)],
    }
    if choose.random() < 0.3:
        fields |= {"token_batch_size": choose.randint(1, 40), "batch_size": 128}
    config = config_of(tmp_path, **fields)
    return config, *build(config, random_outcomes(choose), seed=seed, scores_groups=choose.random() < 0.3)


@pytest.mark.parametrize("seeds", [range(0, 20), range(20, 40)])
async def test_every_run_ends_with_its_batches_or_says_why_not(tmp_path, monkeypatch, seeds):
    monkeypatch.setattr(scheduler, "HOPELESS_GROUPS", 30)
    monkeypatch.setattr(scheduler, "HOPELESS_BATCHES", 3)
    num_done = 0
    for seed in seeds:
        config, orchestrator, trainer, _ = a_random_run(seed, tmp_path)
        counters = orchestrator._scheduler.counters
        if why := await why_it_ended(orchestrator):
            assert "groups in a row had nothing to train on" in why
        else:
            num_done += 1
            assert len(trainer.batches) == config.max_steps
        assert counters.dispatched == counters.ends.total()
        for batch in trainer.batches:
            assert batch.num_loss_tokens > 0
            assert batch.step - batch.min_version <= config.staleness_bound
            assert batch.num_tokens >= (config.token_batch_size or 0)
    assert 0 < num_done < len(seeds), "some of these runs can do it, and some cannot"


async def test_a_batch_of_tokens_holds_as_many_that_are_trained_on_however_many_are_left_out(tmp_path):
    choose = random.Random(0)
    config = config_of(tmp_path, token_batch_size=60, batch_size=128, rollouts_per_example=4)
    orchestrator, trainer, _ = build(config, lambda request: too_long(request) if choose.random() < 0.7 else {})
    await run(orchestrator)
    assert all(60 <= batch.num_tokens < 60 + 4 * 4 for batch in trainer.batches)


def every_second_too_long(any_long, request):
    return too_long(request) if any_long and request.id % 2 else {}


async def test_rollouts_that_are_left_out_as_too_long_are_warned_of_once_a_batch_when_they_are_many(tmp_path, caplog):
    for any_long, num_warnings in ((False, 0), (True, 4)):
        caplog.clear()
        config = config_of(tmp_path)
        orchestrator, _, monitor = build(config, partial(every_second_too_long, any_long))
        with caplog.at_level("WARNING"):
            await run(orchestrator)
        lines = [line for line in caplog.messages if "are longer than seq_len = 64 and were left out" in line]
        assert len(lines) == num_warnings
        assert all((row["rollouts/too_long_rate"] > 0) == any_long for _, row in monitor.rows)


async def test_a_failure_that_is_nobodys_own_but_counted_is_judged_once_and_costs_no_attempt(tmp_path):
    died = {
        is_counted: Failure(kind=FailureKind.WORKER_DIED, message="", is_own=False, is_counted=is_counted)
        for is_counted in (False, True)
    }
    config = config_of(tmp_path, max_attempts=1, max_error_rate=1.0)
    orchestrator, trainer, _ = build(
        config, lambda request: {"failure": died[request.id < 3]} if request.id < 8 else {}
    )
    await run(orchestrator)
    ledger = orchestrator._generation.faults["a"]
    assert sum(isinstance(one, Failure) for one in ledger._recent) == 3
    assert orchestrator._scheduler.counters.number("failed") == 8
    assert orchestrator._scheduler.counters.groups_given_up == 0
    assert len(trainer.batches) == 4


async def test_weights_that_were_never_made_fail_what_was_sampled_with_them(tmp_path):
    config, ended = config_of(tmp_path, max_error_rate=1.0), []

    def outcome(request):
        turn = Turn(prompt_ids=(1,), completion_ids=(5, 6), logprobs=(-0.5, -0.5), versions=(0, 9))
        return {"turns": [turn]} if request.id == 0 else {}

    orchestrator, trainer, _ = build(config, outcome, on_end=ended.append)
    await run(orchestrator)
    (failed,) = [one for one in ended if one.end.kind == "failed"]
    assert failed.result.failure.kind is FailureKind.INFERENCE
    assert failed.result.failure.message == "the server sampled with weights 9, newer than 0: are they of another run?"
    assert len(trainer.batches) == 4


class Everlasting:
    """An evaluation that always wants one more rollout, until training is over."""

    share, pools, is_alone = 0.4, (), False

    def __init__(self):
        self.num_begun = 0

    def on_weights(self, version):
        pass

    def wants(self, now):
        return True

    def next(self, now):
        self.num_begun += 1
        return Job(key=("evaluation", self.num_begun), group=None, version=0, run=self.roll)

    def delay(self, now):
        return None

    def metrics(self):
        return {}

    def snapshot(self):
        return EvaluationState(dispatched=self.num_begun, ends=[])

    async def roll(self, servers):
        await asyncio.sleep(0.001)

    async def finish(self):
        pass


async def test_a_group_that_is_scored_as_one_has_room_beside_an_evaluation_or_the_run_says_so_at_its_start(tmp_path):
    evaluation = Everlasting()
    fields = {"rollouts_per_example": 4, "batch_size": 4}
    config = config_of(tmp_path, **fields, max_concurrent=5)
    orchestrator, trainer, _ = build(config, lambda request: {}, scores_groups=True, evaluation=evaluation)
    await run(orchestrator)
    assert len(trainer.batches) == 4
    assert evaluation.num_begun > 0
    too_few = config_of(tmp_path, **fields, max_concurrent=4)
    with pytest.raises(ConfigError, match=r"max_concurrent = 4 has no room for a group of 4, .* set it to 5 or more"):
        build(too_few, lambda request: {}, scores_groups=True, evaluation=evaluation)
    build(too_few, lambda request: {}, scores_groups=True)
