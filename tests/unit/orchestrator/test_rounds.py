"""In a deterministic run what makes a batch is no matter of timing, whatever fails or is filtered."""

import asyncio
import math
import random

import msgspec
import pytest
from tests.doubles.loops import build

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Failure, FailureKind, Turn
from prime_rl.orchestrator import orchestrator as loops
from prime_rl.orchestrator.groups import Example, FinishedGroup
from prime_rl.orchestrator.limits import SchedulerLimits
from prime_rl.orchestrator.rounds import Rounds, seed_of
from prime_rl.orchestrator.scheduler import Scheduler

EXAMPLE = Example(env="a", index=0)
TIMINGS = range(6)


@pytest.fixture(autouse=True)
def _no_notices(monkeypatch):
    monkeypatch.setattr(loops, "NOTICE_INTERVAL_S", math.inf)


def outcome(request):
    """All that a rollout is follows from the seed that it was asked for with."""
    chance = random.Random(request.sampling["seed"])
    if chance.random() < 0.1:
        return {"failure": Failure(kind=FailureKind.ENVIRONMENT, message="at random")}
    size = chance.randint(1, 9)
    tokens = tuple(chance.randrange(1, 50) for _ in range(size))
    turn = Turn(prompt_ids=(1, 2), completion_ids=tokens, logprobs=(-0.5,) * size, versions=(request.version,) * size)
    return {"reward": float(chance.random() < 0.4), "turns": [turn]}


async def batches_of(tmp_path, timing, *, scores_groups=False, **fields):
    """What a run trains on, at the timing of this number."""
    fields = {"batch_size": 6, "rollouts_per_example": 2, "max_steps": 4, "max_attempts": 2} | fields
    config = OrchestratorConfig.model_validate(
        {
            "client": {"base_url": "http://127.0.0.1:1/v1"},
            "model": {"name": "none"},
            "output_dir": tmp_path / "run",
            "env": [{"id": "a"}, {"id": "b"}],
            "seq_len": 64,
            "max_async_level": 0,
            "max_error_rate": 1.0,
            "deterministic": True,
            **fields,
        }
    )
    orchestrator, trainer, _ = build(config, outcome, seed=timing, scores_groups=scores_groups)
    async with asyncio.timeout(60):
        await orchestrator.run()
    return [msgspec.structs.asdict(batch) for batch in trainer.batches]


RUNS = {
    "plain": {},
    "filtered by difficulty": {"buffer": {"online_difficulty_filtering": True, "easy_threshold": 0.99}},
    "with spares": {"oversampling_factor": 1.7},
    "few at a time": {"max_concurrent": 2},
    "batches of tokens": {"token_batch_size": 40, "batch_size": 128},
    "groups that are scored as one": {"scores_groups": True},
    "filters that leave out": {"filters": [{"type": "zero_advantage", "enforce": True}]},
    "a seed of the sampler": {"sampling": {"seed": 3}},
}


@pytest.mark.parametrize("name", RUNS)
async def test_batches_do_not_depend_on_which_rollout_ended_first(name, tmp_path):
    runs = [repr(await batches_of(tmp_path, timing, **RUNS[name])) for timing in TIMINGS]
    assert len(set(runs)) == 1
    assert runs[0] != repr(await batches_of(tmp_path, 0, **(RUNS[name] | {"seed": 1, "sampling": {"seed": 4}})))


async def test_without_the_mode_they_do(tmp_path):
    fields = RUNS["with spares"] | {"deterministic": False, "sampling": {"seed": 3}}
    assert len({repr(await batches_of(tmp_path, timing, **fields)) for timing in TIMINGS}) > 1


def test_seeds_follow_from_what_something_is():
    seeds = [
        seed_of(42, "train", group, place, attempt) for group in range(9) for place in range(9) for attempt in (1, 2)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert seed_of(42, "train", 1, 23) != seed_of(42, "train", 12, 3)
    assert seed_of(42, "train", 0, 0, 1) == 942614243323055505  # a run that is resumed by a later release goes on alike


def scheduler_of(**limits):
    fields = {"batch_target": 2, "rollouts_per_group": 1, "max_async_level": 0, "max_off_policy_steps": 0}
    return Scheduler(SchedulerLimits(in_rounds=True, **(fields | limits)))


def test_a_round_starts_as_a_whole_and_nothing_before_it_is_judged():
    scheduler, source = scheduler_of(), lambda: EXAMPLE
    first, second = (scheduler.next_dispatch(source) for _ in range(2))
    assert scheduler.counters.groups_started == 2
    for dispatch in (second, first):
        assert scheduler.succeed(dispatch.rollout_id, "done") is not None
    scheduler.filter(second.group, "too_easy")
    assert not scheduler.has_work()
    assert scheduler.next_dispatch(source) is None
    scheduler.accept(first.group, ["done"])
    third = scheduler.next_dispatch(source)
    assert third.group == 2
    assert scheduler.take_batch() is None
    scheduler.succeed(third.rollout_id, "done")
    scheduler.accept(third.group, ["done"])
    assert len(scheduler.take_batch()) == 2


def test_a_batch_waits_for_its_round_though_it_is_full():
    scheduler, source = scheduler_of(oversampling_factor=1.5), lambda: EXAMPLE
    dispatches = [scheduler.next_dispatch(source) for _ in range(3)]
    for dispatch in dispatches[:0:-1]:
        scheduler.succeed(dispatch.rollout_id, dispatch.group)
        scheduler.accept(dispatch.group, [dispatch.group])
    assert scheduler.take_batch() is None
    scheduler.succeed(0, 0)
    scheduler.accept(0, [0])
    assert scheduler.take_batch() == [[0], [1]]


def test_the_groups_of_a_round_are_judged_in_the_order_of_their_numbers_once_none_is_incomplete():
    told = []
    rounds, scheduler = Rounds(told.append, num_unjudged=lambda: scheduler.num_unjudged), scheduler_of(batch_target=3)
    source = iter([Example(env="b", index=1), Example(env="a", index=2), Example(env="a", index=1)]).__next__
    dispatches = [scheduler.next_dispatch(source) for _ in range(3)]
    finished = {}
    for dispatch in reversed(dispatches):
        group = finished[dispatch.group] = scheduler.succeed(dispatch.rollout_id, "done")
        assert isinstance(group, FinishedGroup)
        assert rounds.take() == []
        rounds.complete(group)
    assert rounds.take() == [finished[number] for number in range(3)]
    for number in range(3):
        assert told == []
        scheduler.filter(number, "too_hard")
        rounds.lose(finished[number].example)
    assert told == [Example(env="a", index=1), Example(env="a", index=2), Example(env="b", index=1)]
