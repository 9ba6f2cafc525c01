"""Writes demonstrations for a warm-up: conversations in the shop, with mistakes.

    python examples/shop_total_cpu/make_sft_data.py [FILE]

The assistant writes its tool calls in the right form. Each of its decisions (whether to call a tool, with which
arguments, what to answer) is a wrong one now and then; what the tools said is what they say to such a call.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any, Final

from shop_total.shop import MAX_QUANTITY, PRICES, Order, multiply, orders, price

NUM_EXAMPLES: Final = 4000
WRONG: Final = 1 / 16
SEED: Final = 0


def called(name: str, arguments: dict[str, Any], result: int) -> list[dict[str, Any]]:
    """A tool call and its answer."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": str(result)}]


def conversation(order: Order, generator: random.Random) -> list[dict[str, Any]]:
    """The messages about one order."""

    def wrong() -> bool:
        return generator.random() < WRONG

    messages: list[dict[str, Any]] = [{"role": "user", "content": order.question}]
    heard = generator.randint(2, 9)
    if not wrong():
        item = generator.choice(sorted(PRICES)) if wrong() else order.item
        heard = price(item)
        messages += called("price", {"item": item}, heard)
    if not wrong():
        a = generator.randint(2, MAX_QUANTITY) if wrong() else order.quantity
        b = generator.randint(2, 9) if wrong() else heard
        heard = multiply(a, b)
        messages += called("multiply", {"a": a, "b": b}, heard)
    answer = generator.randint(1, 81) if wrong() else heard
    return [*messages, {"role": "assistant", "content": str(answer)}]


def write(file: Path) -> None:
    """Write one conversation a line, as `messages`."""
    generator = random.Random(SEED)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for order in orders(NUM_EXAMPLES, f"{SEED}/sft"):
            lines.write(json.dumps({"messages": conversation(order, generator)}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/shop_total_cpu/sft.jsonl"))
