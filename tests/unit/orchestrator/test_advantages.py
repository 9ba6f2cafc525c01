import pytest

from prime_rl.orchestrator.advantages import group_advantages


def test_an_advantage_is_the_reward_less_the_mean_of_its_group():
    assert group_advantages([1.0, 0.0, 0.5]) == [0.5, -0.5, 0.0]
    assert group_advantages([0.3, 0.3]) == [0.0, 0.0]
    assert group_advantages([2.0]) == [0.0]


def test_equal_rewards_give_advantages_of_exactly_zero():
    """Their mean in floating point is another number: 0.1 + 0.1 + 0.1 is more than 0.3."""
    assert group_advantages([0.1] * 3) == [0.0, 0.0, 0.0]


def test_advantages_of_a_group_cancel():
    assert sum(group_advantages([0.1, 0.7, 0.33, 0.9, 0.2])) == pytest.approx(0.0)
