"""The game without a model: which numbers are left, and what the host answers to a guess."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """The numbers `low` to `high` (both included) are left, of `num_first` at the beginning.

    The host has no number in mind, and answers so that as many as possible are left: nobody is lucky, and what a game
    is worth says how good its guesses were.

    Example: Game.new(1, 15).after("12") == Game(low=1, high=11, num_first=15, heard="lower")
    """

    low: int
    high: int
    num_first: int
    heard: str = ""
    """What the last guess was answered with; nothing before the first."""

    @classmethod
    def new(cls, low: int, high: int) -> Game:
        return cls(low=low, high=high, num_first=high - low + 1)

    @property
    def is_found(self) -> bool:
        return self.heard == "found"

    @property
    def num_left(self) -> int:
        """Numbers that it may still be."""
        return self.high - self.low + 1

    @property
    def reward(self) -> float:
        """1 when found; else half the share of the way from all numbers to a single one, each halving being a step."""
        return 1.0 if self.is_found else 0.5 * (1 - math.log(self.num_left) / math.log(self.num_first))

    @property
    def message(self) -> str:
        """What the player is told. Example: "lower, between 1 and 11"."""
        known = f"between {self.low} and {self.high}"
        return f"{self.heard}, {known}" if self.heard else known

    def after(self, reply: str) -> Game:
        """The game after a guess. A reply that is no number tells nothing, nor does a number that was ruled out."""
        guess = reply.strip()
        if not (guess.isascii() and guess.isdigit()):
            return self._told("invalid")
        number = int(guess)
        if number == self.low == self.high:
            return self._told("found")
        below, above = number - self.low, self.high - number
        if above >= below:
            return self._told("higher", low=max(self.low, number + 1))
        return self._told("lower", high=min(self.high, number - 1))

    def _told(self, heard: str, low: int | None = None, high: int | None = None) -> Game:
        low, high = self.low if low is None else low, self.high if high is None else high
        return Game(low=low, high=high, num_first=self.num_first, heard=heard)


def new_game(generator: random.Random, highest: int, min_numbers: int) -> Game:
    """A game with at least `min_numbers` of the numbers 1 to `highest`."""
    num_numbers = generator.randint(min_numbers, highest)
    low = generator.randint(1, highest - num_numbers + 1)
    return Game.new(low, low + num_numbers - 1)
