"""From the merged mapping to a configuration object, or to complaints.

Every complaint names the key, where its value was written, and what it should be.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prime_rl.config.schema import Path, keys_at, target_of
from prime_rl.config.sources import Values, unknown_key
from prime_rl.config.values import dotted
from prime_rl.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)

MAX_COMPLAINTS = 8


def validate(root: type[Config], values: Values) -> Config:
    """Validate a merged mapping; ConfigError names every wrong key and where it was written."""
    try:
        return root.model_validate(_with_types(_nulls(values.tree), root))
    except ValidationError as error:
        shortest_first = sorted(error.errors(), key=lambda details: len(details["loc"]))
        # A shared value is wrong in several places at once; it was written once, so it is said once.
        once = {(values.origin(d["loc"]), d["msg"], str(d["input"])): d for d in reversed(shortest_first)}
        lines = [_complaint(root, values, details) for details in reversed(once.values())]
        more = [f"... and {len(lines) - MAX_COMPLAINTS} more"] if len(lines) > MAX_COMPLAINTS else []
        raise ConfigError("\n".join(lines[:MAX_COMPLAINTS] + more)) from None


def _nulls(node: Any) -> Any:
    """TOML has no null: the string "None" stands for it."""
    if isinstance(node, dict):
        return {key: _nulls(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_nulls(value) for value in node]
    return None if node == "None" else node


def _with_types(node: Any, section: type[BaseModel]) -> Any:
    """Where a section may be of several types and none is named, it is of the default's."""
    for name, field in section.model_fields.items() if isinstance(node, dict) else ():
        options = target_of(field.annotation).sections
        value = node.get(name)
        if not options or not isinstance(value, dict):
            continue
        if len(options) > 1 and "type" not in value and hasattr(field.default, "type"):
            value["type"] = field.default.type
        chosen = [o for o in options if len(options) == 1 or o.model_fields["type"].default == value.get("type")]
        if chosen:
            _with_types(value, chosen[0])
    return node


def _complaint(root: type[BaseModel], values: Values, details: ErrorDetails) -> str:
    path = _without_tags(root, details["loc"])
    origin = values.origin(path)
    if details["type"] == "extra_forbidden":
        return unknown_key(root, path, origin)
    key = dotted(path)
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return f"{dotted(path)}: must be given ({values.origin(path[:-1])})"
    if details["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(keys_at(root, path))
        message = f"is a table with the keys {keys}, not {details['input']!r}"
    elif not isinstance(details["input"], dict | BaseModel) and details["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {details['input']!r}"
    return f"{key}: {message} ({origin})" if key else f"{message}"


def _without_tags(root: type[BaseModel], loc: tuple[str | int, ...]) -> Path:
    """pydantic puts the tag of a discriminated union into the location; the user wrote no such key."""
    path: Path = ()
    for index, part in enumerate(loc):
        is_tag = (
            bool(path) and str(part) not in keys_at(root, path) and index + 1 < len(loc) and _names_type(root, path)
        )
        if not is_tag:
            path = (*path, part)
    return path


def _names_type(root: type[BaseModel], path: Path) -> bool:
    return "type" in keys_at(root, path)
