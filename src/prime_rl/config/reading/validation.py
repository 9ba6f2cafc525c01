"""From the merged mapping to a configuration object, or to complaints.

Every complaint names the key, where its value was written, and what it should be.
"""

from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from prime_rl.config.reading.complaints import complaints
from prime_rl.config.reading.variants import tables
from prime_rl.config.schema import members
from prime_rl.config.values import Values
from prime_rl.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)

MAX_COMPLAINTS = 8


def validate(root: type[Config], values: Values) -> Config:
    """Validate a merged mapping; ConfigError names every wrong key and where it was written."""
    try:
        return root.model_validate(_for_pydantic(root, values))
    except ValidationError as error:
        lines = complaints(root, values, error)
        more = [f"... and {len(lines) - MAX_COMPLAINTS} more"] if len(lines) > MAX_COMPLAINTS else []
        raise ConfigError("\n".join(lines[:MAX_COMPLAINTS] + more)) from None


def _for_pydantic(root: type[BaseModel], values: Values) -> dict[str, Any]:
    """A copy of the mapping, as pydantic would be strict or lax about it where the user expects it to be.

    A table of several types that names none is of the default's. A truth value is no number.
    """
    tree: dict[str, Any] = _nulls(values.tree)
    _no_truth_values_for_numbers(root, tree)
    for table in tables(root, tree):
        if table.default_type is not None and len(table.options) > 1:
            table.values.setdefault("type", table.default_type)
        if table.section:
            _no_truth_values_for_numbers(table.section, table.values)
    return tree


def _nulls(node: Any) -> Any:
    """TOML has no null: the string "None" stands for it."""
    if isinstance(node, dict):
        return {key: _nulls(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_nulls(value) for value in node]
    return None if node == "None" else node


def _no_truth_values_for_numbers(section: type[BaseModel], table: dict[str, Any]) -> None:
    """pydantic reads true as 1; as the text that a flag would be, it is refused."""
    for name, field in section.model_fields.items():
        types = {item for option in members(field.annotation) for item in _items(option)}
        if types & {int, float} and bool not in types and name in table:
            table[name] = _as_text(table[name])


def _items(annotation: Any) -> list[Any]:
    """The types of a tuple's items; for anything else, itself."""
    if get_origin(annotation) is not tuple:
        return [annotation]
    return [option for item in get_args(annotation) for option in members(item)]


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value
