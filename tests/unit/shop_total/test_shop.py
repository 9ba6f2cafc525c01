from typing import Any

import pytest

from shop_total.shop import PRICES, Order, multiply, orders, parsed, price

ORDER = Order(item="apple", quantity=4)
PRICE = ("price", {"item": "apple"})
PRODUCT = ("multiply", {"a": 4, "b": 3})


def test_the_two_tools_compute_the_total_of_every_order() -> None:
    for item in PRICES:
        for quantity in range(2, 10):
            assert multiply(quantity, price(item)) == Order(item=item, quantity=quantity).total


@pytest.mark.parametrize(
    ("calls", "answer", "expected"),
    [
        ([PRICE, PRODUCT], "12", 1.0),
        ([PRICE, ("multiply", {"a": 3, "b": 4})], " 12\n", 1.0),
        ([PRICE, PRODUCT], "13", 0.5),
        ([PRICE, PRODUCT], "", 0.5),
        ([PRICE], "12", 0.25),
        ([PRODUCT], "12", 0.25),
        ([], "12", 0.0),
        ([PRICE, PRICE, PRODUCT], "12", 1.0),
        ([("price", {"item": "egg"}), PRICE, PRODUCT], "12", 1.0),
        ([("price", {"item": "egg"}), ("multiply", {"a": 4, "b": 2})], "8", 0.0),
        ([PRICE, ("multiply", {"a": 4, "b": "3"})], "12", 0.25),
        ([PRICE, ("multiply", {"a": 4})], "12", 0.25),
        ([("price", {"item": "apple", "b": 1}), PRODUCT], "12", 0.25),
    ],
)
def test_the_reward_has_the_values_worked_out_by_hand(
    calls: list[tuple[str, dict[str, Any]]], answer: str, expected: float
) -> None:
    assert ORDER.score(calls, answer) == expected


def test_arguments_that_are_no_json_object_count_as_none() -> None:
    assert parsed("price", '{"item": "egg"}') == ("price", {"item": "egg"})
    assert parsed("price", '"egg"') == ("price", {})
    assert parsed("price", "{item") == ("price", {})


def test_orders_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert orders(20, "0/train") == orders(30, "0/train")[:20]
    assert orders(20, "0/train") != orders(20, "0/eval")
    assert {order.item for order in orders(200, "0/train")} == set(PRICES)
    assert {order.quantity for order in orders(200, "0/train")} == set(range(2, 10))
