"""How keys are spelt: `max-steps` and `max_steps` are one, and a list of tables is addressed by index."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel

from prime_rl.config.compat.translation import kind_at
from prime_rl.config.schema import Kind, Path, field_at, find, members


def canonical(root: type[BaseModel], path: Path) -> Path:
    """The path as the schema spells it: snake case, and an index after a list of tables, 0 where none is given.

    What stands in a free table keeps its spelling, but for the names of arguments (`args`, `extra_body`, `vllm`).
    """
    full: Path = ()
    for part in path:
        full = (*full, *_next(root, full, part))
    return full


def _next(root: type[BaseModel], before: Path, part: str | int) -> Path:
    if isinstance(part, int):
        return (part,)
    kind = kind_at(root, before)
    if kind is Kind.FREE or (kind is Kind.MAPPING and not _holds_arguments(root, before)):
        return (part,)
    snake = part.replace("-", "_")
    if kind is Kind.LIST:
        if part.isascii() and part.isdigit() and len(part) < 10:
            return (int(part),)
        target = find(root, before)
        return (0, snake) if target and target.sections else (snake,)
    return (snake,)


def _holds_arguments(root: type[BaseModel], path: Path) -> bool:
    """Whether a free table's keys are names of arguments, which have no dashes: its values may be anything."""
    field = field_at(root, path)
    tables = [option for option in members(field.annotation) if get_origin(option) is dict] if field else []
    return any(get_args(table)[1] is Any for table in tables)
