"""Every value is computed by hand: one row a case, the rewards and lengths first."""

import math
import re
import sys
from pathlib import Path

import pytest

from prime_rl.config.algorithms import AdvantageConfig, CustomAdvantageConfig, DistillationConfig, RewardAdvantageConfig
from prime_rl.environments.rollouts import Rollout, Turn
from prime_rl.errors import ConfigError, PrimeRLError
from prime_rl.orchestrator.advantages import Group, build_advantages, normalised, spread


def group(
    rewards: list[float], lengths: list[int] | None = None, prompts: list[list[int]] | None = None, truncated: int = 0
) -> Group:
    """Rollouts of these rewards, whose turns have prompts of so many tokens; the first `truncated` were cut off."""
    rollouts = []
    for index, reward in enumerate(rewards):
        length = lengths[index] if lengths else 2
        sizes = prompts[index] if prompts else [1]
        turns = []
        for place, size in enumerate(sizes):
            sampled = length if place == 0 else 0
            tokens = {"completion_ids": [7] * sampled, "logprobs": [-0.5] * sampled, "versions": [0] * sampled}
            turns.append(Turn(prompt_ids=[1] * size, **tokens))
        rollout = Rollout(id=index, env="sums", example=3, reward=reward, turns=turns, truncated=index < truncated)
        rollouts.append(rollout)
    return Group(rollouts=rollouts)


def advantages(found: Group, **keys) -> list[float]:
    return build_advantages(AdvantageConfig.model_validate(keys))(found)


TABLE = [
    ("the mean", {}, [1.0, 0.0, 0.5], None, [0.5, -0.5, 0.0]),
    ("one rollout", {}, [2.0], None, [0.0]),
    ("others' mean", {"leave_one_out": True}, [1.0, 0.0, 0.5], None, [0.75, -0.75, 0.0]),  # x 3/2
    # mean reward of a token: (1*1 + 0*3) / 4 = 1/4
    ("by length", {"length_weighted_mean": True}, [1.0, 0.0], [1, 3], [0.75, -0.25]),
    # others' tokens: (0*3 + 1*2)/5, (1*1 + 1*2)/3, (1*1 + 0*3)/4
    (
        "others by length",
        {"length_weighted_mean": True, "leave_one_out": True},
        [1.0, 0.0, 1.0],
        [1, 3, 2],
        [0.6, -1.0, 0.75],
    ),
    # sqrt((0.25 + 0.25 + 0) / 2) = 0.5
    ("by deviation", {"std_norm": "local"}, [1.0, 0.0, 0.5], None, [1.0, -1.0, 0.0]),
    ("clipped", {"neg_clipped": True}, [1.0, 0.0, 0.5], None, [0.5, 0.0, 0.0]),
    ("divided, then clipped", {"neg_clipped": True, "std_norm": "local"}, [1.0, 0.0, 0.5], None, [1.0, 0.0, 0.0]),
    # lengths over their mean 2: 0.5 and 1.5; rewards 1/(1 + 0.5) = 2/3 and 1/(1 + 1.5) = 2/5; their mean 8/15
    ("shaped", {"length_shaping_alpha": 1.0}, [1.0, 1.0], [1, 3], [2 / 15, -2 / 15]),
    ("shaped by nothing", {"length_shaping_alpha": 0.0}, [1.0, 0.0], [1, 3], [0.5, -0.5]),
    # costs 0.25 * 1/2 + 0.1 + 0.1 and 0.25 + 0.1 + 0.1; rewards 1 - 0.325 and 1 - 0.45
    ("penalty", {"length_penalty": {}}, [1.0, 1.0], [1, 2], [0.0625, -0.0625]),
    ("penalty of nothing", {"length_penalty": {}}, [0.0, 0.0], [1, 2], [0.0, 0.0]),
]


@pytest.mark.parametrize(
    ("keys", "rewards", "lengths", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_advantages_equal_those_computed_by_hand(keys, rewards, lengths, expected):
    assert advantages(group(rewards, lengths), **keys) == pytest.approx(expected, abs=1e-7)


def test_equal_rewards_give_advantages_of_exactly_zero():
    """Their mean in floating point is another number: 0.1 + 0.1 + 0.1 is more than 0.3."""
    for keys in ({}, {"leave_one_out": True}, {"std_norm": "local"}, {"length_weighted_mean": True}):
        assert advantages(group([0.1] * 3, [1, 2, 5]), **keys) == [0.0, 0.0, 0.0]


def test_the_penalty_weighs_what_was_sampled_what_was_sent_and_turns():
    """Rollouts of 4 and 2 sampled tokens, 8 and 2 + 2 sent, 1 and 2 turns; the mean reward is 1."""
    found = group([1.5, 0.5], [4, 2], [[8], [2, 2]])
    penalty = {"output_weight": 0.4, "input_weight": 0.2, "turns_weight": 0.1}
    # 1.5 - (0.4 + 0.2 + 0.05) = 0.85; 0.5 - (0.2 + 0.1 + 0.1) = 0.1; their mean 0.475
    assert advantages(found, length_penalty=penalty) == pytest.approx([0.375, -0.375])
    assert advantages(found, length_penalty=dict.fromkeys(penalty, 0)) == pytest.approx([0.5, -0.5])


def test_a_rollout_that_was_cut_off_counts_as_without_reward_when_that_is_asked_for():
    found = group([1.0, 1.0], truncated=1)
    assert advantages(found) == [0.0, 0.0]
    assert advantages(found, zero_truncated=True) == [-0.5, 0.5]


def test_others_without_a_token_are_no_baseline():
    keys = {"length_weighted_mean": True, "leave_one_out": True}
    assert advantages(group([1.0, 0.0], [2, 0]), **keys) == [0.0, -1.0]


def test_what_needs_the_whole_batch_is_left_to_it():
    assert advantages(group([1.0, 0.0]), std_norm="global", neg_clipped=True) == [0.5, -0.5]
    assert normalised([0.5, -0.5], 0.25, neg_clipped=True) == pytest.approx([2.0, 0.0])


def test_the_deviation_is_that_of_a_sample():
    assert spread([1.0, 2.0, 3.0]) == 1.0
    assert spread([4.0]) == 0.0


def test_the_reward_itself_and_no_advantage_at_all_are_algorithms_too():
    assert build_advantages(RewardAdvantageConfig())(group([1.0, 0.3])) == [1.0, 0.3]
    assert build_advantages(DistillationConfig())(group([1.0, 0.3])) == [0.0, 0.0]


MODULE = """
def best_of(group, *, margin=0.0):
    best = max(group.rewards)
    return [float(reward >= best - margin) for reward in group.rewards]

def where(group):
    return [group.example, len(group.env), *group.completion_lens][: len(group.rollouts)]

def too_few(group):
    return [1.0]

def not_finite(group):
    return [float("nan")] * len(group.rollouts)

def broken(group):
    return [1 / 0 for _ in group.rollouts]

def wordy(group):
    return ["much"] * len(group.rollouts)
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    (tmp_path / "own_advantages.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_advantages", raising=False)

    def build(name: str, **kwargs):
        config = CustomAdvantageConfig(import_path=f"own_advantages.{name}", kwargs=kwargs)
        return build_advantages(config, key="env.1.advantage")

    return build


def test_a_function_of_the_users_gives_the_advantages(custom):
    assert custom("best_of")(group([0.2, 0.9, 0.8])) == [0.0, 1.0, 0.0]
    assert custom("best_of", margin=0.1)(group([0.2, 0.9, 0.8])) == [0.0, 1.0, 1.0]
    assert custom("where")(group([0.0] * 3, [4, 2, 2])) == [3.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("best", {}, r"env.1.advantage.import_path = 'own_advantages.best': module .* has no function 'best'; it has"),
        (
            "best_of",
            {"edge": 1},
            r"env.1.advantage.kwargs: own_advantages.best_of cannot be called with \(group, edge\)",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(custom, name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        custom(name, **kwargs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "own_advantages.too_few returned 1 numbers for 2 rollouts"),
        ("not_finite", "not_finite returned nan for environment 'sums', example 3; an advantage is a finite number"),
        (
            "broken",
            r"broken failed on a group of environment 'sums', example 3: ZeroDivisionError.*own_advantages.py:16",
        ),
        ("wordy", "wordy failed .* ValueError: could not convert string to float: 'much'.* one number a rollout"),
    ],
)
def test_a_function_that_fails_ends_the_run_in_words(custom, name, message):
    with pytest.raises(PrimeRLError, match=message):
        custom(name)(group([1.0, 0.0]))


def test_every_advantage_is_finite_whatever_the_lengths():
    for lengths in ([0, 0], [0, 1]):
        for keys in ({"length_weighted_mean": True}, {"length_shaping_alpha": 1.0}, {"length_penalty": {}}):
            for alone in (False, True):
                found = advantages(group([1.0, 0.0], lengths), leave_one_out=alone, **keys)
                assert all(math.isfinite(value) for value in found)


DOCUMENTATION = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_the_worked_examples_of_the_documentation_give_what_it_says(tmp_path, monkeypatch):
    text = DOCUMENTATION.read_text()
    (code,) = re.findall(r"```python\n# my_advantages.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_advantages.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    ranks = CustomAdvantageConfig(import_path="my_advantages.ranks", kwargs={"bonus": 0.1})
    found = build_advantages(ranks)(group([0.2, 0.9, 0.2, 0.5], truncated=1))
    assert found == pytest.approx([-2 / 3, 1.1, -2 / 3 + 0.1, 1 / 3 + 0.1])
    rows = re.findall(r"^\| (none|`[a-z_]+.*?) \| .*? \| \[(.*?)\]", text.split("Worked example")[1], re.MULTILINE)
    assert len(rows) == 6
    for keys, expected in rows:
        name, _, value = keys.strip("`").partition(" = ")
        given = {} if name == "none" else {name: eval(value) if value else True}
        values = [eval(number) for number in expected.split(", ")]
        assert advantages(group([1.0, 0.0, 0.5], [1, 3, 2]), **given) == pytest.approx(values, abs=1e-3), keys
