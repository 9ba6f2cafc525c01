"""What follows from an orchestrator's keys."""

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig


def configured(**fields):
    return OrchestratorConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, 1 + 8),
        ({"max_async_level": 3, "max_off_policy_steps": 2}, 5),
        ({"max_async_level": 0}, 0),
        ({"max_async_level": 2, "strict_async_level": True}, 2),
    ],
)
def test_how_old_a_token_may_be_follows_from_the_level_and_its_strictness(fields, bound):
    assert configured(**fields).staleness_bound == bound


def test_environments_have_the_ratios_that_are_given_in_either_place_or_none():
    two = [{"id": "a"}, {"id": "b"}]
    assert configured(env=two).env_ratios is None
    assert configured(env=two, buffer={"env_ratios": [3, 1]}).env_ratios == {"a": 3, "b": 1}
    assert configured(env=[one | {"ratio": 2} for one in two]).env_ratios == {"a": 2, "b": 2}


def test_a_batch_of_tokens_need_not_be_a_number_of_whole_groups():
    assert configured(token_batch_size=1000, rollouts_per_example=7, num_train_workers=500).token_batch_size == 1000
    with pytest.raises(ValueError, match="divisible"):
        configured(rollouts_per_example=7)


def test_what_the_environment_wrote_is_never_trained_on_as_if_it_were_sampled():
    with pytest.raises(ValueError, match="no importance ratio"):
        configured(mask_env_responses=False)
