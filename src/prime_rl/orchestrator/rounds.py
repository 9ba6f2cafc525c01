"""Judging in rounds, for runs that are deterministic: what becomes of groups must not depend on which ended first.

    a round starts: as many groups as there is room for --> all are complete, or given up --> each is judged, in the
    order of their numbers --> the next round, or a batch

So the buffer learns of them in that order, filters see them in it, and which groups make a batch is a matter of their
numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic

import xxhash

from prime_rl.orchestrator.groups import Example, FinishedGroup, Result

SEED_BITS: Final = 62
"""A server takes seeds of 63, and adds the number of the choice to them."""


def seed_of(*identity: str | int) -> int:
    """A seed that follows from what something is, whenever it comes.

    Example: seed_of(42, "train", 7, 0, 1) is that of the first attempt of rollout 0 of group 7.
    """
    return xxhash.xxh3_64_intdigest("/".join(map(str, identity)).encode()) >> (64 - SEED_BITS)


class Rounds(Generic[Result]):
    """The groups of a round that wait for its end."""

    def __init__(self, replace: Callable[[Example], None], *, num_unjudged: Callable[[], int]) -> None:
        """`replace` is told of every example whose group came to nothing, once the round is over. `num_unjudged`: the
        scheduler's; the round is over when it is 0."""
        self._replace = replace
        self._num_unjudged = num_unjudged
        self._complete: dict[int, FinishedGroup[Result]] = {}
        self._lost: list[Example] = []

    def lose(self, example: Example) -> None:
        """A group of this example came to nothing."""
        self._lost.append(example)
        self.settle()

    def complete(self, group: FinishedGroup[Result]) -> None:
        """The group is complete, and waits to be judged."""
        self._complete[group.number] = group

    def take(self) -> list[FinishedGroup[Result]]:
        """All groups of the round in the order of their numbers, once none of it is incomplete; else none."""
        if len(self._complete) < self._num_unjudged():
            return []
        groups, self._complete = sorted(self._complete.items()), {}
        return [group for _, group in groups]

    def settle(self) -> None:
        """Where the round is over, tell of the examples whose groups came to nothing."""
        if self._num_unjudged() == 0:
            lost, self._lost = sorted(self._lost, key=lambda example: (example.env, example.index)), []
            for example in lost:
                self._replace(example)
