"""From a command line to a validated configuration.

    defaults < PRIME_ variables < TOML files, left to right < flags

`load` merges the sources, fills shared values (`share`), and validates; every complaint names the key, where its value
was written, and what it should be. `write_toml` writes a configuration that loads back to itself.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prime_rl.config.schema import Path, keys_at
from prime_rl.config.sources import Values, env_settings, merge, parse_argv, unknown_key
from prime_rl.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)
Shared = Mapping[str, tuple[str, ...]]

MAX_COMPLAINTS = 8


def load(root: type[Config], argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration that `argv` and the environment describe.

    Before validation, the root's class attribute `shared` (root key -> component keys) has its values filled in, and
    its class method `prepare` fills what is derived.
    Raises ConfigError, with one line per complaint.
    """
    command = parse_argv(root, argv)
    variables = list(env_settings(root, os.environ if environment is None else environment))
    values = merge(variables, command.files, command.flags)
    share(values, root)
    if prepare := getattr(root, "prepare", None):
        prepare(values)
    return validate(root, values)


def validate(root: type[Config], values: Values) -> Config:
    """Validate a merged mapping; ConfigError names every wrong key and where it was written."""
    try:
        return root.model_validate(_nulls(values.tree))
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


def _complaint(root: type[BaseModel], values: Values, details: ErrorDetails) -> str:
    path = _without_tags(root, details["loc"])
    origin = values.origin(path)
    if details["type"] == "extra_forbidden":
        return unknown_key(root, path, origin)
    dotted = ".".join(str(part) for part in path)
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(keys_at(root, path))
        message = f"is a table with the keys {keys}, not {details['input']!r}"
    elif not isinstance(details["input"], dict | BaseModel) and details["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {details['input']!r}"
    return f"{dotted}: {message} ({origin})" if dotted else f"{message}"


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


def share(values: Values, root: type[BaseModel]) -> None:
    """Write every shared fact once: the root fills the components, and a component's value is lifted to the root.

    For each root key: the places that have a value must agree (else ConfigError names both); then every place has it.
    An optional component that is off stays off.
    """
    shared: Shared = getattr(root, "shared", {})
    for root_key, component_keys in shared.items():
        places = [_split(key) for key in (root_key, *component_keys)]
        given = [(path, found[0]) for path in places if (found := _lookup(values.tree, path))]
        if not given:
            continue
        first_path, value = given[0]
        for path, other in given[1:]:
            if str(other) != str(value):
                raise ConfigError(
                    f"{_dotted(first_path)} is {value!r} ({values.origin(first_path)}) but {_dotted(path)} is "
                    f"{other!r} ({values.origin(path)}); they are one value: set {root_key} only"
                )
        origin = values.origin(first_path)
        for path in places:
            is_off = root.model_fields[str(path[0])].default is None and values.get(path[:1]) is None
            if len(path) == 1 or not is_off:
                _put(values, path, value, origin)


def _split(key: str) -> Path:
    return tuple(key.split("."))


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _lookup(tree: Any, path: Path) -> tuple[Any] | None:
    for part in path:
        if not isinstance(tree, dict) or part not in tree:
            return None
        tree = tree[part]
    return (tree,)


def _put(values: Values, path: Path, value: Any, origin: str) -> None:
    node: Any = values.tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return  # a scalar where a table belongs: validation says so
    node[path[-1]] = value
    values.origins[path] = origin


def to_toml(config: BaseModel) -> str:
    """The configuration as TOML, every key spelled out, so that it loads back to itself whatever the defaults are."""
    return tomli_w.dumps(_plain(config.model_dump(mode="json")))


def write_toml(config: BaseModel, path: FilePath) -> None:
    """Write `to_toml(config)` to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(to_toml(config), encoding="utf-8")
    temporary.replace(path)


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return "None" if node is None else node
