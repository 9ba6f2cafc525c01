"""Which example comes next, and which groups are worth training on. Pure; the same seed gives the same order.

    normal --draw--> a group of rollouts --judge--> trained on, or replaced by one of another example
       ^  \\                                 |
       |   +--- easy, hard <----------------+ a mean reward beyond a threshold puts the example aside
       +- the next epoch: what was not put aside, shuffled anew

An epoch of an environment is every example in its normal pool once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final, Literal

from prime_rl.config.algorithms import BufferConfig
from prime_rl.errors import PrimeRLError
from prime_rl.orchestrator.groups import Example

Aside = Literal["easy", "hard"]

_ROUNDING: Final = 1e-9


class Ratios:
    """Which environment comes next, so that after any number of draws each was drawn as often as is its share.

    After t draws an environment of share s was drawn more than s t - 1 and less than s t + 1 times (Tijdeman, The
    chairman assignment problem, 1980).

    Example: shares 3:1 give a, a, b, a and so on.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: above 0; they need not add up to 1."""
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}
        self._drawn = Counter[str]()
        self._slack = 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0

    def next(self) -> str:
        """The name that is drawn now: of those that are behind, the one that must come soonest."""
        number = self._drawn.total() + 1
        behind = {name: share * number - self._drawn[name] for name, share in self._shares.items()}
        due = [name for name, lag in behind.items() if lag >= self._slack - _ROUNDING]
        name = min(due, key=lambda name: (1 - self._slack - behind[name]) / self._shares[name])
        self._drawn[name] += 1
        return name


class _Pool:
    """The examples of one environment."""

    def __init__(self, num_examples: int, seed: str) -> None:
        self.aside: dict[int, Aside] = {}
        self.epoch = -1
        self._num_examples = num_examples
        self._seed = seed
        self._order: list[int] = []

    @property
    def num_normal(self) -> int:
        return self._num_examples - len(self.aside)

    def next(self) -> int:
        """An example of the normal pool, which is not empty."""
        while True:
            if not self._order:
                self.epoch += 1
                self._order = [index for index in range(self._num_examples) if index not in self.aside]
                random.Random(f"{self._seed}/{self.epoch}").shuffle(self._order)
            index = self._order.pop()
            if index not in self.aside:
                return index


class Buffer:
    """The examples of all environments."""

    def __init__(
        self,
        num_examples: Mapping[str, int],
        config: BufferConfig | None = None,
        *,
        ratios: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        """`num_examples` by environment label, each above 0; `ratios`: None: in proportion to them."""
        self._config = config or BufferConfig()
        seed = seed if self._config.seed is None else self._config.seed
        self._pools = {env: _Pool(number, f"{seed}/{env}") for env, number in num_examples.items()}
        self._weights = dict(ratios or num_examples)
        self._ratios = Ratios(self._weights)
        self._owed: deque[str] = deque()
        """Environments of which a group came to nothing: another of theirs takes its place."""
        self._filtered: Counter[Aside] = Counter()

    @property
    def epoch(self) -> int:
        """The epoch of the environment that is furthest behind; -1 before its first example."""
        return min(pool.epoch for pool in self._pools.values())

    def next(self) -> Example:
        """The example of the next group. Raises: PrimeRLError when every example was put aside."""
        while self._owed:
            if self._pools[env := self._owed.popleft()].num_normal:
                return Example(env=env, index=self._pools[env].next())
        while not self._pools[env := self._ratios.next()].num_normal:
            self._leave_out(env)
        return Example(env=env, index=self._pools[env].next())

    def replace(self, example: Example) -> None:
        """A group of this example came to nothing; another of its environment comes next."""
        self._owed.append(example.env)

    def judge(self, example: Example, rewards: Sequence[float]) -> str:
        """What to do with a complete group: "" to train on it, else why it is filtered.

        Puts the example aside where the mean reward is beyond a threshold.
        """
        config, mean = self._config, fmean(rewards)
        if config.easy_threshold is not None and mean >= config.easy_threshold:
            self._pools[example.env].aside[example.index] = "easy"
        elif config.hard_threshold is not None and mean <= config.hard_threshold:
            self._pools[example.env].aside[example.index] = "hard"
        if not config.online_difficulty_filtering or mean not in (0.0, 1.0):
            return ""
        difficulty: Aside = "easy" if mean else "hard"
        self._filtered[difficulty] += 1
        return f"too_{difficulty}"

    def metrics(self) -> dict[str, float]:
        """Examples in each pool, over all environments and of each, and groups that were filtered so far."""
        figures = {f"buffer/filtered/{aside}": float(self._filtered[aside]) for aside in ("easy", "hard")}
        totals: Counter[str] = Counter()
        for env, pool in self._pools.items():
            sizes = Counter[str](pool.aside.values())
            sizes["normal"] = pool.num_normal
            totals += sizes
            figures |= {f"pool/{env}/{name}": float(sizes[name]) for name in ("easy", "normal", "hard")}
        return figures | {f"pool/{name}": float(totals[name]) for name in ("easy", "normal", "hard")}

    def _leave_out(self, env: str) -> None:
        """Every example of `env` was put aside: the others go on without it."""
        del self._weights[env]
        if not self._weights:
            sizes = Counter(aside for pool in self._pools.values() for aside in pool.aside.values())
            raise PrimeRLError(
                f"no example is left to draw: {sizes['easy']} were put aside as easy and {sizes['hard']} as hard; move "
                "buffer.easy_threshold and buffer.hard_threshold further out, or give the environments more examples"
            )
        self._ratios = Ratios(self._weights)
