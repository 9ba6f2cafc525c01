"""Older spellings of keys."""

from prime_rl.config.sources import Values


def resolve_gpu_counts(values: Values) -> None:
    """Turn counts of GPUs into their ids: the server takes the first ones, the trainer the next."""
