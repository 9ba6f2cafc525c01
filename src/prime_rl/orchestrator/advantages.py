"""Advantages: how much better a rollout was than the others of its group. Pure.

With rewards R and completion lengths L of a group of G rollouts, by default:

    R'   R; 0 where zero_truncated and truncated; R / (1 + alpha L / mean(L)) with length_shaping_alpha (GR3); or
         R - mean(R) (w_o out / max(out) + w_i in / max(in) + w_t turns / max(turns)) with length_penalty
    b    mean(R') (Dr. GRPO, arXiv 2503.20783), or sum(R' L) / sum(L) with length_weighted_mean (OPO, arXiv 2505.23585);
         with leave_one_out over the other rollouts of the group (RLOO, arXiv 2402.14740)
    A    R' - b; divided by the standard deviation of R' with std_norm = local (GRPO, arXiv 2402.03300), or of the
         batch's A with global (REINFORCE++, arXiv 2501.03262); then max(A, 0) with neg_clipped

Standard deviations are those of a sample (divided by n - 1), plus 1e-8. Where all R' are equal, A is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prime_rl.config.algorithms import (
    AdvantageConfig,
    AnyAdvantageConfig,
    CustomAdvantageConfig,
    LengthPenaltyConfig,
    RewardAdvantageConfig,
)
from prime_rl.config.functions import load_function, reason
from prime_rl.environments.rollouts import Rollout
from prime_rl.errors import PrimeRLError

EPSILON: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one example, none of which failed: what a custom advantage is given."""

    rollouts: Sequence[Rollout]

    @property
    def env(self) -> str:
        return self.rollouts[0].env

    @property
    def example(self) -> int:
        """Index of the example in its environment."""
        return self.rollouts[0].example

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def completion_lens(self) -> list[int]:
        """Tokens that were sampled."""
        return [rollout.num_completion_tokens for rollout in self.rollouts]


Advantages = Callable[[Group], list[float]]
"""The advantage of each rollout of a group, in their order."""


def build_advantages(config: AnyAdvantageConfig, *, key: str = "advantage") -> Advantages:
    """The function that `config` names. `key`: where it stands.

    Raises: ConfigError for a custom one that cannot be called. It raises PrimeRLError where it fails, or returns
    something else than a finite number a rollout.
    """
    if isinstance(config, CustomAdvantageConfig):
        return _custom(config, key)
    if isinstance(config, AdvantageConfig):
        return lambda group: group_advantages(group, config)
    if isinstance(config, RewardAdvantageConfig):
        return lambda group: group.rewards
    return lambda group: [0.0] * len(group.rollouts)  # distillation: no policy gradient


def group_advantages(group: Group, config: AdvantageConfig) -> list[float]:
    """All but `std_norm = "global"`, for which `normalised` needs the whole batch.

    Example: rewards [1, 0, 0.5] -> [0.5, -0.5, 0.0]
    """
    rewards = shaped_rewards(group, config)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of three times 0.1 is not 0.1
    lengths = group.completion_lens if config.length_weighted_mean else [1] * len(rewards)
    baselines = _baselines(rewards, lengths, leave_one_out=config.leave_one_out)
    advantages = [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]
    if config.std_norm == "global":
        return advantages
    return normalised(advantages, spread(rewards) if config.std_norm else None, neg_clipped=config.neg_clipped)


def normalised(advantages: Sequence[float], deviation: float | None, *, neg_clipped: bool) -> list[float]:
    """Divided by a standard deviation (None: not), then clipped from below."""
    scale = 1.0 if deviation is None else deviation + EPSILON
    scaled = [advantage / scale for advantage in advantages]
    return [max(advantage, 0.0) for advantage in scaled] if neg_clipped else scaled


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def shaped_rewards(group: Group, config: AdvantageConfig) -> list[float]:
    """R' of the formulas above."""
    rewards = [0.0 if config.zero_truncated and one.truncated else one.reward for one in group.rollouts]
    if config.length_shaping_alpha is not None:
        lengths = group.completion_lens
        mean = sum(lengths) / len(lengths)
        costs = [length / mean if mean else 0.0 for length in lengths]
        return [reward / (1 + config.length_shaping_alpha * cost) for reward, cost in zip(rewards, costs, strict=True)]
    if config.length_penalty is not None:
        mean_reward = math.fsum(rewards) / len(rewards)
        costs = _costs(group.rollouts, config.length_penalty)
        return [reward - mean_reward * cost for reward, cost in zip(rewards, costs, strict=True)]
    return rewards


def _costs(rollouts: Sequence[Rollout], weights: LengthPenaltyConfig) -> list[float]:
    """What each rollout cost, relative to the costliest."""
    measures = [
        (weights.output_weight, [rollout.num_completion_tokens for rollout in rollouts]),
        (weights.input_weight, [sum(len(turn.prompt_ids) for turn in rollout.turns) for rollout in rollouts]),
        (weights.turns_weight, [len(rollout.turns) for rollout in rollouts]),
    ]
    return [
        math.fsum(weight * amounts[index] / max(amounts) for weight, amounts in measures if max(amounts))
        for index in range(len(rollouts))
    ]


def _baselines(rewards: Sequence[float], weights: Sequence[int], *, leave_one_out: bool) -> list[float]:
    """For each rollout the weighted mean reward of all, or of the others; its own reward where these weigh nothing."""
    weighted = [weight * reward for weight, reward in zip(weights, rewards, strict=True)]
    total, weight_of_all = math.fsum(weighted), sum(weights)
    if not leave_one_out:
        return [total / weight_of_all if weight_of_all else reward for reward in rewards]
    return [
        (total - own) / (weight_of_all - weight) if weight_of_all > weight else reward
        for reward, own, weight in zip(rewards, weighted, weights, strict=True)
    ]


def _custom(config: CustomAdvantageConfig, key: str) -> Advantages:
    function = load_function(config.import_path, key=key, takes="group", kwargs=config.kwargs)
    name = f"the advantage {config.import_path}"

    def advantages(group: Group) -> list[float]:
        try:
            returned = [float(value) for value in function(group, **config.kwargs)]
        except Exception as error:
            raise PrimeRLError(
                f"{name} failed on a group of environment {group.env!r}, example {group.example}: {reason(error)}; it "
                "returns one number a rollout, see docs/algorithms.md"
            ) from error
        if len(returned) != len(group.rollouts):
            raise PrimeRLError(f"{name} returned {len(returned)} numbers for {len(group.rollouts)} rollouts")
        wrong = [value for value in returned if not math.isfinite(value)]
        if wrong:
            raise PrimeRLError(
                f"{name} returned {wrong[0]} for environment {group.env!r}, example {group.example}; an advantage is a "
                "finite number"
            )
        return returned

    return advantages
