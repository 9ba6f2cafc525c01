"""higher-lower: find a number; after each guess the model hears whether it is higher or lower."""

from higher_lower.environment import load_environment

__all__ = ["load_environment"]
