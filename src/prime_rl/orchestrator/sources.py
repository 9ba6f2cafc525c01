"""Which example comes next. Pure; the same seed gives the same order."""

from __future__ import annotations

import random
from collections.abc import Mapping

from prime_rl.orchestrator.scheduler import Example


class ExampleSource:
    """The examples of all environments, epoch after epoch.

    An epoch is one shuffle of all examples of all environments together. So every example comes once an epoch, and the
    environments come in proportion to their numbers of examples, evenly mixed.
    """

    def __init__(self, num_examples: Mapping[str, int], seed: int) -> None:
        """`num_examples` by environment label; at least one example in all."""
        self._all = [Example(env=env, index=index) for env, num in num_examples.items() for index in range(num)]
        assert self._all, "environments without examples are refused before"
        self._seed = seed
        self._order: list[Example] = []
        self.epoch = -1

    def next(self) -> Example:
        """The next example; a new epoch begins when all have come."""
        if not self._order:
            self.epoch += 1
            self._order = self._all.copy()
            random.Random(f"{self._seed}/{self.epoch}").shuffle(self._order)
        return self._order.pop()
