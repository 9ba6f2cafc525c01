"""What an evaluation consists of, when one is due, and how far it got. Pure: times are passed in.

Schedule --due--> Round: Parts (environments) --next--> Items (rollouts) --ended, or again--> reports
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prime_rl.config.evals import EvalConfig, EvalEnvConfig, OnlineEvalConfig
from prime_rl.environments.rollouts import Rollout, WorkerReady
from prime_rl.errors import ConfigError, EnvironmentSetupError
from prime_rl.evals.report import EvalReport, Outcome, make_report
from prime_rl.logs import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment of an evaluation, by its label: which examples, and how often each."""

    env: str
    examples: range
    rollouts_per_example: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One rollout to run. `attempt` counts from 1."""

    number: int
    """Counts the rollouts of its environment."""
    part: int
    example: int
    attempt: int = 1


def plan_part(env: EvalEnvConfig, config: EvalConfig | OnlineEvalConfig, size: WorkerReady) -> Part:
    """What of an environment is evaluated. Raises: EnvironmentSetupError, ConfigError when that is nothing."""
    if size.num_eval == 0:
        raise EnvironmentSetupError(f"environment {env.label!r} has no evaluation examples")
    if env.skip_first >= size.num_eval:
        raise ConfigError(
            f"skip_first = {env.skip_first} leaves none of the {size.num_eval} evaluation examples of "
            f"environment {env.label!r}"
        )
    if not size.has_eval_split:
        _logger.warning(
            "Environment %s has no evaluation split: what is reported is on the examples that it trains on", env.label
        )
    num_examples = config.num_examples if env.num_examples is None else env.num_examples
    end = size.num_eval if num_examples == -1 else min(env.skip_first + num_examples, size.num_eval)
    return Part(
        env=env.label,
        examples=range(env.skip_first, end),
        rollouts_per_example=env.rollouts_per_example or config.rollouts_per_example,
    )


class Schedule:
    """Which weights are evaluated during training: where a multiple of `interval` is reached or passed, for not every
    version is served long enough to be seen; the last ones; and, `at_start`, those that the run begins with.
    """

    def __init__(self, interval: int, *, at_start: bool, last: int | None) -> None:
        """`last`: the version after the last step; None: there is none."""
        self._interval = interval
        self._at_start = at_start
        self._last = last
        self._begun = -1
        """The version that was evaluated last."""

    def is_due(self, version: int) -> bool:
        """Whether an evaluation should begin now that `version` is served."""
        if self._begun < 0 and version == 0:
            return self._at_start
        before = max(self._begun, 0)
        return version // self._interval > before // self._interval or (version == self._last and version > self._begun)

    def begin(self, version: int) -> None:
        """An evaluation begins with the weights of `version`, or was complete when the run was last ended."""
        self._begun = version


class Round:
    """One evaluation that goes on: every example of every part as often as it says, part after part."""

    def __init__(self, parts: Sequence[Part], step: int) -> None:
        """`step`: the version of the weights that it begins with."""
        self.step = step
        self._parts = list(parts)
        self._waiting = deque(
            Item(number=number, part=index, example=example)
            for index, part in enumerate(parts)
            for number, example in enumerate(e for e in part.examples for _ in range(part.rollouts_per_example))
        )
        self._missing = [len(part.examples) * part.rollouts_per_example for part in parts]
        self._ended: list[dict[int, Outcome]] = [{} for _ in parts]
        self._retries = [0] * len(parts)
        self._since: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    @property
    def has_next(self) -> bool:
        """Whether a rollout waits to be run."""
        return bool(self._waiting)

    @property
    def is_done(self) -> bool:
        """Whether every rollout has ended."""
        return not any(self._missing)

    def next(self, now: float) -> Item:
        """The next rollout to run. `now`: seconds, of a clock that never goes back."""
        item = self._waiting.popleft()
        self._since.setdefault(item.part, now)
        return item

    def again(self, item: Item, *, counts: bool) -> None:
        """A rollout that `next` gave is to be run once more. `counts`: as another attempt."""
        self._retries[item.part] += 1
        self._waiting.appendleft(replace(item, attempt=item.attempt + counts))

    def end(self, item: Item, rollout: Rollout, now: float) -> None:
        """A rollout that `next` gave has ended. What the figures do not need of it is not kept."""
        assert item.number not in self._ended[item.part], "a rollout ends once"
        self._ended[item.part][item.number] = Outcome.of(rollout)
        self._missing[item.part] -= 1
        self._seconds[item.part] = now - self._since[item.part]

    def outcomes(self, part: int) -> list[Outcome]:
        """Of the rollouts of one part that have ended, in the order of its examples."""
        return [outcome for _, outcome in sorted(self._ended[part].items(), key=lambda item: item[0])]

    def reports(self) -> list[EvalReport]:
        """The figures of every part, once it is done."""
        assert self.is_done
        return [
            make_report(
                self.outcomes(index),
                env=part.env,
                step=self.step,
                rollouts_per_example=part.rollouts_per_example,
                seconds=self._seconds[index],
                retries=self._retries[index],
            )
            for index, part in enumerate(self._parts)
        ]
