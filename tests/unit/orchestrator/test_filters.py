import json
import math

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Rollout, Turn
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.filters import build_filters, longest_certain_run, vocabulary_size

VOCABULARY = 1000
UNIFORM = -math.log(VOCABULARY)  # -6.9078


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return str(tmp_path)


def rollout(*turns: list[tuple[int, float]], truncated: bool = False) -> Rollout:
    """Turns of (token id, logprob)."""
    return Rollout(
        id=0,
        env="a",
        example=0,
        reward=0.0,
        truncated=truncated,
        turns=[
            Turn(
                prompt_ids=[1],
                completion_ids=[token for token, _ in turn],
                logprobs=[logprob for _, logprob in turn],
                versions=[0] * len(turn),
            )
            for turn in turns
        ],
    )


def found(model: str, one: Rollout, *, advantage: float = 1.0, is_taught: bool = False, **keys) -> bool:
    too_long, only = build_filters(OrchestratorConfig.model_validate({"filters": [keys]}).filters, model, 2048)
    assert (too_long.name, only.name) == ("too_long", keys["type"])
    assert not too_long.finds(one, advantage, is_taught)
    return only.finds(one, advantage, is_taught)


@pytest.mark.parametrize(
    ("token", "logprob", "expected"),
    [
        (501, UNIFORM - 2.01, True),
        (501, UNIFORM - 1.99, False),  # not so improbable
        (500, UNIFORM - 9.0, False),  # not above the threshold
        (7, -50.0, False),
    ],
)
def test_gibberish_is_a_rare_token_that_was_itself_improbable(model, token, logprob, expected):
    one = rollout([(7, -0.1)], [(7, -0.1), (token, logprob)])
    assert found(model, one, type="gibberish", token_id_threshold=500) is expected
    assert found(model, one, type="gibberish", token_id_threshold=500, logprob_offset=60.0) is False


def test_repetition_is_a_stretch_of_nearly_certain_tokens_within_a_turn(model):
    sure, unsure = (7, math.log(0.995)), (7, math.log(0.98))
    assert longest_certain_run(rollout([sure, unsure, sure, sure], [sure]), math.log(0.99)) == 2
    assert found(model, rollout([sure] * 3), type="repetition", window=3)
    assert not found(model, rollout([sure] * 3), type="repetition", window=4)
    assert not found(model, rollout([sure] * 2, [sure] * 2), type="repetition", window=3)
    assert not found(model, rollout([sure] * 3), type="repetition", window=3, prob_threshold=0.999)
    assert longest_certain_run(rollout(), 0.0) == 0


def test_an_advantage_of_zero_teaches_nothing_unless_a_teacher_does(model):
    one = rollout([(7, -1.0)])
    assert found(model, one, advantage=0.0, type="zero_advantage")
    assert not found(model, one, advantage=-0.1, type="zero_advantage")
    assert not found(model, one, advantage=0.0, is_taught=True, type="zero_advantage")


def test_what_a_length_limit_ended_is_truncated(model):
    assert found(model, rollout([(7, -1.0)], truncated=True), type="truncated")
    assert not found(model, rollout([(7, -1.0)]), type="truncated")


def test_a_rollout_with_a_turn_that_does_not_fit_a_sample_is_too_long_whatever_is_configured(model):
    (too_long,) = build_filters((), model, 4)
    assert too_long.enforce
    assert not too_long.finds(rollout([(7, -1.0)], [(7, -1.0)] * 3), 1.0, True), "a prompt of 1 and 3 tokens"
    assert too_long.finds(rollout([(7, -1.0)], [(7, -1.0)] * 4), 1.0, True)


def test_the_vocabulary_is_that_of_the_models_config(model, tmp_path):
    assert vocabulary_size(model) == VOCABULARY
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9}}))
    assert vocabulary_size(model) == 9


def test_a_model_without_a_config_cannot_be_looked_through_for_gibberish(tmp_path):
    filters = OrchestratorConfig.model_validate({"filters": [{"type": "gibberish"}]}).filters
    with pytest.raises(ConfigError, match=r"the gibberish filter needs the vocabulary size of .* FileNotFoundError"):
        build_filters(filters, str(tmp_path), 2048)
