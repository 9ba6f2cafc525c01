"""shop-total: what some of an item cost, with a tool that knows prices and one that multiplies."""

from shop_total.environment import load_environment

__all__ = ["load_environment"]
