"""The classic verifiers form: a `ToolEnv` with two tools."""

from __future__ import annotations

import verifiers.legacy as vf
from datasets import Dataset

from shop_total.shop import Order, multiply, orders, parsed, price


def calls_of(completion: vf.Messages) -> list[tuple[str, dict[str, object]]]:
    """The tool calls of a conversation, in order."""
    calls = [call for message in completion for call in getattr(message, "tool_calls", None) or []]
    return [parsed(call.name, call.arguments) for call in calls]


async def right_calls_and_answer(completion: vf.Messages, info: vf.Info) -> float:
    """The reward: see `Order.score`."""
    last = completion[-1] if completion else None
    answer = last.content if isinstance(last, vf.AssistantMessage) and not last.tool_calls else None
    return Order(**info).score(calls_of(completion), answer if isinstance(answer, str) else "")


def load_environment(
    num_examples: int = 1000, num_eval_examples: int = 100, max_turns: int = 4, seed: int = 0
) -> vf.Environment:
    """Orders such as "4 apple". Ends with the first reply that calls no tool, or after `max_turns`."""

    def build(split: str, num: int) -> Dataset:
        return Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": order.question}],
                    "answer": str(order.total),
                    "info": {"item": order.item, "quantity": order.quantity},
                }
                for order in orders(num, f"{seed}/{split}")
            ]
        )

    return vf.ToolEnv(
        tools=[price, multiply],
        error_formatter=lambda error: "error",
        dataset=lambda: build("train", num_examples),
        eval_dataset=lambda: build("eval", num_eval_examples),
        rubric=vf.Rubric(funcs=[right_calls_and_answer]),
        max_turns=max_turns,
    )
