"""Finished groups become what is trained on: rollouts with their advantages, samples and verdicts of filters. Pure.

group --> score_group --> teacher.annotate --> finish_batch --> samples
          advantages,     logprobs of a       what needs the
          filters         teacher             whole batch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from prime_rl.config.algorithms import AdvantageConfig, AnyAdvantageConfig, CustomAdvantageConfig
from prime_rl.config.orchestrator import OrchestratorConfig, TrainEnvConfig
from prime_rl.data.samples import TrainingSample
from prime_rl.environments.rollouts import Rollout
from prime_rl.environments.trajectories import Strategy, training_samples
from prime_rl.orchestrator.advantages import Advantages, Group, build_advantages, normalised, spread
from prime_rl.orchestrator.filters import Filter, build_filters
from prime_rl.orchestrator.groups import FinishedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """A rollout of a batch with its advantage and the samples made of it."""

    rollout: Rollout
    advantage: float
    samples: list[TrainingSample]
    detected: tuple[str, ...] = ()
    """Filters that found it."""
    filtered_by: str = ""
    """The first of them that leaves it out of training; "": it is trained on."""

    @property
    def versions(self) -> list[int]:
        """Weights versions of its sampled tokens."""
        return [version for turn in self.rollout.turns for version in turn.versions]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the server was sent, those of every turn."""
        return sum(len(turn.prompt_ids) for turn in self.rollout.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples: trained on, or given as context."""
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """The groups of a batch with their final advantages."""

    groups: list[list[ScoredRollout]]
    samples: list[TrainingSample]
    """What is trained on: the samples of all rollouts that no filter left out."""
    metrics: dict[str, float]
    """Rollouts that filters found: `filter/<name>/count` and `/rate`; the share left out, `filter/enforced_rate`; the
    mean temperature of samples, `sampling/temperature`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What the rollouts of one environment learn from."""

    config: AnyAdvantageConfig
    advantages: Advantages
    pool: str
    """Rollouts of one pool are normalised together by `std_norm = "global"`."""
    is_taught: bool
    """Whether they learn from a teacher too, so that an advantage of 0 does not make them useless."""

    @property
    def over_batch(self) -> AdvantageConfig | None:
        """The configuration, where its advantages need the whole batch."""
        config = self.config
        return config if isinstance(config, AdvantageConfig) and config.std_norm == "global" else None


class Scorer:
    """Scores groups and batches. Made by `build_scorer`."""

    def __init__(self, algorithms: Mapping[str, Algorithm], filters: Sequence[Filter], strategy: Strategy) -> None:
        """`algorithms` by environment label."""
        self._algorithms = algorithms
        self._filters = filters
        self._strategy = strategy

    def name(self, env: str) -> str:
        """What computes the advantages of an environment, for messages."""
        config = self._algorithms[env].config
        return f"the advantage {config.import_path if isinstance(config, CustomAdvantageConfig) else config.type}"

    def score_group(self, group: FinishedGroup[Rollout], *, temperature: float) -> list[ScoredRollout]:
        """The rollouts of `group`, sampled at `temperature`, in the order of their places.

        Raises: PrimeRLError where a custom advantage fails.
        """
        algorithm = self._algorithms[group.example.env]
        advantages = algorithm.advantages(Group(rollouts=group.results))
        return [
            self._scored(rollout, advantage, temperature, algorithm)
            for rollout, advantage in zip(group.results, advantages, strict=True)
        ]

    def finish_batch(self, groups: Sequence[Sequence[ScoredRollout]]) -> FinishedBatch:
        """Apply what needs the whole batch. Its samples may be none, where filters left out every rollout."""
        deviations = self._deviations(groups)
        finished = [[self._normalised(scored, deviations) for scored in group] for group in groups]
        rollouts = [scored for group in finished for scored in group]
        samples = [sample for scored in rollouts if not scored.filtered_by for sample in scored.samples]
        return FinishedBatch(groups=finished, samples=samples, metrics=self._metrics(rollouts))

    def _scored(self, rollout: Rollout, advantage: float, temperature: float, algorithm: Algorithm) -> ScoredRollout:
        over_batch = algorithm.over_batch
        will_be_zero = over_batch is not None and over_batch.neg_clipped and advantage < 0
        final = 0.0 if will_be_zero else advantage
        found = [one for one in self._filters if one.finds(rollout, final, algorithm.is_taught)]
        return ScoredRollout(
            rollout=rollout,
            advantage=advantage,
            samples=training_samples(rollout, advantage=advantage, temperature=temperature, strategy=self._strategy),
            detected=tuple(one.name for one in found),
            filtered_by=next((one.name for one in found if one.enforce), ""),
        )

    def _deviations(self, groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, float]:
        """Standard deviation of the advantages of each pool that is normalised over the batch."""
        pools: dict[str, list[float]] = {}
        for scored in (scored for group in groups for scored in group):
            algorithm = self._algorithms[scored.rollout.env]
            if algorithm.over_batch is not None:
                pools.setdefault(algorithm.pool, []).append(scored.advantage)
        return {pool: spread(advantages) for pool, advantages in pools.items()}

    def _normalised(self, scored: ScoredRollout, deviations: Mapping[str, float]) -> ScoredRollout:
        algorithm = self._algorithms[scored.rollout.env]
        config = algorithm.over_batch
        if config is None:
            return scored
        (advantage,) = normalised([scored.advantage], deviations[algorithm.pool], neg_clipped=config.neg_clipped)
        samples = [msgspec.structs.replace(sample, advantage=advantage) for sample in scored.samples]
        return replace(scored, advantage=advantage, samples=samples)

    def _metrics(self, rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
        temperatures = [sample.temperature for scored in rollouts for sample in scored.samples]
        metrics = {"sampling/temperature": sum(temperatures) / len(temperatures)} if temperatures else {}
        counts = Counter(name for scored in rollouts for name in scored.detected)
        for one in self._filters:
            metrics[f"filter/{one.name}/count"] = float(counts[one.name])
            metrics[f"filter/{one.name}/rate"] = counts[one.name] / len(rollouts)
        enforced = sum(bool(scored.filtered_by) for scored in rollouts)
        return metrics | {"filter/enforced_rate": enforced / len(rollouts)}


def build_scorer(config: OrchestratorConfig) -> Scorer:
    """Raises: ConfigError for a custom advantage that cannot be called, or a filter that lacks the model's config."""
    algorithms: dict[str, Algorithm] = {}
    shared = build_advantages(config.advantage_of(TrainEnvConfig()))
    for index, env in enumerate(config.env):
        own = None if env.advantage is None else build_advantages(env.advantage, key=f"env.{index}.advantage")
        algorithms[env.label] = Algorithm(
            config=config.advantage_of(env),
            advantages=own or shared,
            pool=env.label if own else "",
            is_taught=config.is_taught(env),
        )
    return Scorer(
        algorithms, build_filters(config.filters, config.model.name, config.seq_len), config.trajectory_strategy
    )
