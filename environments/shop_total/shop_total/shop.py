"""The shop without a model: the two tools, the orders, and what a conversation about an order is worth."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

PRICES: Final = {"apple": 3, "bread": 7, "cake": 9, "egg": 2, "fish": 8, "milk": 4, "rice": 5, "tea": 6}
MAX_QUANTITY: Final = 9


def price(item: str) -> int:
    """The price of one piece of an item.

    Args:
        item: name of the item
    """
    return PRICES[item]


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: the one number
        b: the other number
    """
    return int(a) * int(b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How many of what. Example: Order(item="apple", quantity=4) costs 12."""

    item: str
    quantity: int

    @property
    def question(self) -> str:
        return f"{self.quantity} {self.item}"

    @property
    def total(self) -> int:
        return self.quantity * PRICES[self.item]

    def score(self, calls: Sequence[tuple[str, dict[str, Any]]], answer: str) -> float:
        """A quarter for asking the price of the item, a quarter for multiplying it, a half for the right answer.

        `calls` are tool names with their arguments, in order. An answer counts only with both calls before it.
        """
        factors = sorted((self.quantity, PRICES[self.item]))
        asked = ("price", {"item": self.item}) in calls
        multiplied = any(name == "multiply" and _numbers(arguments) == factors for name, arguments in calls)
        is_right = asked and multiplied and answer.strip() == str(self.total)
        return 0.25 * asked + 0.25 * multiplied + 0.5 * is_right


def orders(num: int, seed: str) -> list[Order]:
    """`num` orders, drawn from `seed`. There are few different ones, so some come twice."""
    generator = random.Random(seed)
    items = sorted(PRICES)
    return [Order(item=generator.choice(items), quantity=generator.randint(2, MAX_QUANTITY)) for _ in range(num)]


def parsed(name: str, arguments: str) -> tuple[str, dict[str, Any]]:
    """A tool call as the model wrote it; without arguments where they are no JSON object."""
    try:
        values = json.loads(arguments)
    except ValueError:
        values = {}
    return name, values if isinstance(values, dict) else {}


def _numbers(arguments: dict[str, Any]) -> list[Any] | None:
    if set(arguments) != {"a", "b"} or not all(isinstance(value, int) for value in arguments.values()):
        return None
    return sorted(arguments.values())
