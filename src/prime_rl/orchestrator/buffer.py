"""Which example comes next, and which groups are worth training on. Pure; the same seed gives the same order.

    normal --draw--> a group of rollouts --judge--> trained on, or replaced by one of another example
       ^  \\                                 |
       |   +--- easy, hard <----------------+ a mean reward beyond a threshold puts the example aside
       +- the next epoch: what was not put aside, shuffled anew

An epoch of an environment is every example in its normal pool once.

A buffer that is restored draws what the other would have drawn next. When a run is resumed, its data may be other: an
example is recognised by its fingerprint then (`environments.fingerprints`), and what is not recognised is normal. The
environment then begins a new epoch.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

from prime_rl.config.algorithms import BufferConfig
from prime_rl.errors import Hopeless
from prime_rl.orchestrator.groups import Example

Aside = Literal["easy", "hard"]

UNKNOWN: Final = 0
"""The fingerprint of an example that nobody has told."""

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What is known of the examples of one environment."""

    num_examples: int
    epoch: int
    position: int
    """How much of the epoch's order was looked at."""
    aside: dict[int, tuple[Aside, int]]
    """By index: in which pool it is, and its fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """What a buffer knows."""

    pools: dict[str, PoolState]
    weights: dict[str, float]
    """Of the environments that are drawn."""
    drawn: dict[str, int]
    """How often each was."""
    owed: list[str]
    filtered: dict[Aside, int]
    num_returns: int
    """How often examples came back from aside, which seeds the choice."""


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
        self.drawn = Counter[str]()
        self._slack = 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0

    def next(self) -> str:
        """The name that is drawn now: of those that are behind, the one that must come soonest."""
        number = self.drawn.total() + 1
        behind = {name: share * number - self.drawn[name] for name, share in self._shares.items()}
        due = [name for name, lag in behind.items() if lag >= self._slack - _ROUNDING]
        name = min(due, key=lambda name: (1 - self._slack - behind[name]) / self._shares[name])
        self.drawn[name] += 1
        return name


class _Pool:
    """The examples of one environment."""

    def __init__(self, num_examples: int, seed: str) -> None:
        self.aside: dict[int, tuple[Aside, int]] = {}
        """By index: where it is, and its fingerprint."""
        self.epoch = -1
        self.num_examples = num_examples
        self._seed = seed
        self._order: list[int] = []
        self._position = 0

    @property
    def num_normal(self) -> int:
        return self.num_examples - len(self.aside)

    def next(self) -> int:
        """An example of the normal pool, which is not empty."""
        while True:
            if self._position == len(self._order):
                self._begin(self.epoch + 1)
            index = self._order[self._position]
            self._position += 1
            if index not in self.aside:
                return index

    def take_back(self, kind: Aside, fraction: float, seed: str) -> None:
        """Some of the examples that are aside are normal again; which ones follows from `seed`."""
        there = sorted(index for index, (where, _) in self.aside.items() if where == kind)
        for index in random.Random(f"{self._seed}/{kind}/{seed}").sample(there, round(fraction * len(there))):
            del self.aside[index]

    def snapshot(self) -> PoolState:
        return PoolState(
            num_examples=self.num_examples, epoch=self.epoch, position=self._position, aside=dict(self.aside)
        )

    def restore(self, state: PoolState) -> None:
        """Of other examples (`num_examples`), or at their end: the next epoch begins with the next example."""
        self.aside = dict(state.aside)
        self.epoch, self._order, self._position = state.epoch, [], 0
        if state.num_examples == self.num_examples and state.epoch >= 0:
            self._begin(state.epoch)
            self._position = state.position

    def _begin(self, epoch: int) -> None:
        """The order follows from seed and epoch alone: what is put aside meanwhile, or comes back, does not move it."""
        self.epoch, self._position = epoch, 0
        self._order = list(range(self.num_examples))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)


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
        self._num_returns = 0
        self._owed: deque[str] = deque()
        """Environments of which a group came to nothing: another of theirs takes its place."""
        self._filtered: Counter[Aside] = Counter()

    @property
    def epoch(self) -> int:
        """The epoch of the environment that is furthest behind; -1 before its first example."""
        return min(pool.epoch for pool in self._pools.values())

    def next(self) -> Example:
        """The example of the next group. Raises: Hopeless when every example was put aside."""
        while self._owed:
            if self._pools[env := self._owed.popleft()].num_normal:
                return Example(env=env, index=self._pools[env].next())
        while not self._pools[env := self._ratios.next()].num_normal:
            self._leave_out(env)
        return Example(env=env, index=self._pools[env].next())

    def replace(self, example: Example) -> None:
        """A group of this example came to nothing; another of its environment comes next."""
        self._owed.append(example.env)

    def judge(self, example: Example, rewards: Sequence[float], fingerprint: int = UNKNOWN) -> str:
        """What to do with a complete group: "" to train on it, else why it is filtered.

        Puts the example aside where the mean reward is beyond a threshold.
        """
        config, mean = self._config, fmean(rewards)
        if config.easy_threshold is not None and mean >= config.easy_threshold:
            self._pools[example.env].aside[example.index] = "easy", fingerprint
        elif config.hard_threshold is not None and mean <= config.hard_threshold:
            self._pools[example.env].aside[example.index] = "hard", fingerprint
        if not config.online_difficulty_filtering or mean not in (0.0, 1.0):
            return ""
        difficulty: Aside = "easy" if mean else "hard"
        self._filtered[difficulty] += 1
        return f"too_{difficulty}"

    def snapshot(self) -> BufferState:
        """All that `restore` needs to go on from here. It stays as it is whatever happens then."""
        return BufferState(
            pools={env: pool.snapshot() for env, pool in self._pools.items()},
            weights=dict(self._weights),
            drawn=dict(self._ratios.drawn),
            owed=list(self._owed),
            filtered=dict(self._filtered),
            num_returns=self._num_returns,
        )

    def restore(self, state: BufferState, *, takes_back: bool = False) -> None:
        """Go on from `state`; this buffer has drawn nothing yet. Environments that are new begin anew.

        `takes_back`: of the examples that are aside, `easy_fraction` and `hard_fraction` are normal again.
        """
        config, times = self._config, str(state.num_returns)
        for env, pool in self._pools.items():
            if env in state.pools:
                pool.restore(state.pools[env])
            if takes_back:
                pool.take_back("easy", config.easy_fraction, times)
                pool.take_back("hard", config.hard_fraction, times)
        self._num_returns = state.num_returns + takes_back
        left_out = state.pools.keys() - state.weights.keys()
        self._weights = {
            env: weight for env, weight in self._weights.items() if env not in left_out or self._pools[env].num_normal
        } or self._weights
        self._ratios = Ratios(self._weights)
        if self._weights == state.weights:
            self._ratios.drawn.update(state.drawn)
        self._owed = deque(env for env in state.owed if env in self._pools)
        self._filtered = Counter(state.filtered)

    def metrics(self) -> dict[str, float]:
        """Examples in each pool, over all environments and of each, and groups that were filtered so far."""
        figures = {f"buffer/filtered/{aside}": float(self._filtered[aside]) for aside in ("easy", "hard")}
        totals: Counter[str] = Counter()
        for env, pool in self._pools.items():
            sizes = Counter[str](where for where, _ in pool.aside.values())
            sizes["normal"] = pool.num_normal
            totals += sizes
            figures |= {f"pool/{env}/{name}": float(sizes[name]) for name in ("easy", "normal", "hard")}
        return figures | {f"pool/{name}": float(totals[name]) for name in ("easy", "normal", "hard")}

    def _leave_out(self, env: str) -> None:
        """Every example of `env` was put aside: the others go on without it."""
        del self._weights[env]
        if not self._weights:
            sizes = Counter(where for pool in self._pools.values() for where, _ in pool.aside.values())
            raise Hopeless(
                f"no example is left to draw: {sizes['easy']} were put aside as easy and {sizes['hard']} as hard; move "
                "buffer.easy_threshold and buffer.hard_threshold further out, or give the environments more examples"
            )
        self._ratios = Ratios(self._weights)
