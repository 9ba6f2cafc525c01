import numpy as np
import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Rollout, Turn
from prime_rl.orchestrator.groups import Example, FinishedGroup
from prime_rl.orchestrator.scoring import FinishedBatch, ScoredRollout, build_scorer


def rollouts(env: str, rewards: list[float], truncated: tuple[int, ...] = ()) -> list[Rollout]:
    turn = Turn(prompt_ids=[5, 9], completion_ids=[7, 2], logprobs=[-0.1, -1.2], versions=[3, 3])
    return [
        Rollout(id=index, env=env, example=0, reward=reward, turns=[turn], truncated=index in truncated)
        for index, reward in enumerate(rewards)
    ]


def finished(env: str, results: list[Rollout]) -> FinishedGroup[Rollout]:
    return FinishedGroup(number=0, example=Example(env=env, index=0), first_version=3, batch=0, results=results)


def scored(keys: dict, *groups: tuple[str, list[float]], **more) -> list[list[ScoredRollout]]:
    config = OrchestratorConfig.model_validate({"rollouts_per_example": 2, "batch_size": 4, **keys})
    scorer = build_scorer(config)
    return [
        scorer.score_group(finished(env, rollouts(env, rewards, **more)), temperature=0.5) for env, rewards in groups
    ]


def batch(keys: dict, *groups: tuple[str, list[float]], **more) -> FinishedBatch:
    config = OrchestratorConfig.model_validate({"rollouts_per_example": 2, "batch_size": 4, **keys})
    return build_scorer(config).finish_batch(scored(keys, *groups, **more))


ENV = "reverse-text"


def advantages(found: FinishedBatch) -> list[float]:
    assert [sample.advantage for sample in found.samples] == [one.advantage for group in found.groups for one in group]
    return [sample.advantage for sample in found.samples]


def test_a_group_becomes_samples_with_its_advantages_and_its_temperature():
    (group,) = scored({}, (ENV, [1.0, 0.0]))
    assert [one.advantage for one in group] == [0.5, -0.5]
    assert [one.filtered_by for one in group] == ["", ""]
    (sample,) = group[0].samples
    np.testing.assert_array_equal(sample.token_ids, [5, 9, 7, 2])
    assert (sample.advantage, sample.reward, sample.temperature) == (0.5, 1.0, 0.5)
    assert (group[0].num_tokens, group[0].num_prompt_tokens, group[0].versions) == (4, 2, [3, 3])


def test_global_deviations_are_those_of_the_whole_batch():
    """Advantages 1, -1, 0.5, -0.5 and 0, 0: their deviation is sqrt(2.5 / 5)."""
    groups = ((ENV, [2.0, 0.0]), (ENV, [1.0, 0.0]), (ENV, [1.0, 1.0]))
    found = batch({"advantage": {"type": "default", "std_norm": "global"}}, *groups)
    expected = np.array([1, -1, 0.5, -0.5, 0, 0]) / np.sqrt(0.5)
    assert advantages(found) == pytest.approx(expected)
    clipped = batch({"advantage": {"type": "default", "std_norm": "global", "neg_clipped": True}}, *groups)
    assert advantages(clipped) == pytest.approx(expected.clip(min=0))


def test_a_batch_of_equal_rewards_is_divided_by_nothing():
    assert advantages(batch({"advantage": {"type": "default", "std_norm": "global"}}, (ENV, [1.0, 1.0]))) == [0.0, 0.0]


def test_each_environment_has_its_own_algorithm_and_its_own_deviation():
    keys = {
        "advantage": {"type": "default", "std_norm": "global"},
        "env": [
            {"id": "a"},
            {"id": "b", "advantage": {"type": "reward"}},
            {"id": "c", "advantage": {"type": "default", "std_norm": "global"}},
            {"id": "d"},
        ],
    }
    found = batch(keys, ("a", [3.0, 1.0]), ("b", [3.0, 1.0]), ("c", [5.0, 1.0]), ("d", [3.0, 1.0]))
    of_a_and_d, of_c = np.sqrt(4 / 3), np.sqrt(8)  # of 1, -1, 1, -1 and of 2, -2
    expected = [1 / of_a_and_d, -1 / of_a_and_d, 3, 1, 2 / of_c, -2 / of_c, 1 / of_a_and_d, -1 / of_a_and_d]
    assert advantages(found) == pytest.approx(expected)


def test_what_an_enforced_filter_finds_is_left_out_and_what_others_find_is_counted():
    filters = [{"type": "truncated", "enforce": False}, {"type": "zero_advantage"}]
    found = batch({"filters": filters}, (ENV, [1.0, 0.0]), (ENV, [1.0, 1.0]), truncated=(0,))
    rows = [(one.detected, one.filtered_by, len(one.samples)) for group in found.groups for one in group]
    assert rows == [
        (("truncated",), "", 1),
        ((), "", 1),
        (("truncated", "zero_advantage"), "zero_advantage", 1),
        (("zero_advantage",), "zero_advantage", 1),
    ]
    assert [sample.reward for sample in found.samples] == [1.0, 0.0]
    assert found.metrics == {
        "filter/too_long/count": 0.0,
        "filter/too_long/rate": 0.0,
        "filter/truncated/count": 2.0,
        "filter/truncated/rate": 0.5,
        "filter/zero_advantage/count": 2.0,
        "filter/zero_advantage/rate": 0.5,
        "filter/enforced_rate": 0.5,
        "sampling/temperature": 0.5,
    }


def test_the_first_filter_that_is_enforced_is_the_reason():
    filters = [{"type": "zero_advantage", "enforce": False}, {"type": "truncated"}, {"type": "zero_advantage"}]
    ((first, second),) = scored({"filters": filters}, (ENV, [1.0, 1.0]), truncated=(0,))
    assert (first.filtered_by, second.filtered_by) == ("truncated", "zero_advantage")


def test_what_is_too_long_is_left_out_and_its_reward_stays_in_the_baseline():
    found = batch({"seq_len": 3, "filters": [{"type": "zero_advantage"}]}, (ENV, [1.0, 0.0]))
    assert [(one.filtered_by, one.advantage) for one in found.groups[0]] == [("too_long", 0.5), ("too_long", -0.5)]
    assert found.samples == []
    assert found.metrics["filter/too_long/rate"] == found.metrics["filter/enforced_rate"] == 1.0
    found = batch({"seq_len": 4}, (ENV, [1.0, 0.0]))
    assert len(found.samples) == 2


def test_what_computes_the_advantages_of_an_environment_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named_advantage.py").write_text("def mine(group):\n    return group.rewards\n")
    own = {"type": "custom", "import_path": "named_advantage.mine"}
    scorer = build_scorer(OrchestratorConfig.model_validate({"env": [{"id": "a", "advantage": own}, {"id": "b"}]}))
    assert (scorer.name("a"), scorer.name("b")) == ("the advantage named_advantage.mine", "the advantage default")


def test_a_batch_may_have_nothing_to_train_on():
    found = batch({"filters": [{"type": "zero_advantage"}]}, (ENV, [1.0, 1.0]))
    assert found.samples == []
    assert len(found.groups[0]) == 2


def test_an_advantage_that_the_batch_will_clip_to_zero_teaches_nothing():
    keys = {
        "advantage": {"type": "default", "std_norm": "global", "neg_clipped": True},
        "filters": [{"type": "zero_advantage"}],
    }
    found = batch(keys, (ENV, [1.0, 0.0]))
    assert [one.filtered_by for one in found.groups[0]] == ["", "zero_advantage"]
    assert [sample.advantage for sample in found.samples] == pytest.approx([0.5 / np.sqrt(0.5)])
