"""From a command line to a validated configuration.

    defaults < PRIME_ variables < TOML files, left to right < flags

`resolve` merges the sources, fills shared values (`share`), and validates; every complaint names the key, where its
value was written, and what it should be. `write_toml` writes a configuration that loads back to itself.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prime_rl.config.schema import Path, is_switch, keys_at, target_of
from prime_rl.config.sources import Values, env_settings, merge, parse_argv, unknown_key
from prime_rl.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)
MAX_COMPLAINTS = 8


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Config]):
    """A configuration and how it came about."""

    config: Config
    values: Values
    """The merged sources, with the place that each value was written at."""

    @property
    def notices(self) -> list[str]:
        """What the user should know although nothing is wrong."""
        return self.values.notices


def resolve(root: type[Config], argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Resolved[Config]:
    """The configuration that `argv` and the environment describe.

    Before validation, the root's class attributes `shared_sections` and `shared` (root key -> component keys) have
    their values filled in, and its class method `prepare` fills what is derived.
    Raises ConfigError, with one line per complaint.
    """
    command = parse_argv(root, argv)
    variables = list(env_settings(root, os.environ if environment is None else environment))
    values = merge(root, variables, command.files, command.flags)
    share_sections(values, root)
    share(values, root)
    if prepare := getattr(root, "prepare", None):
        prepare(values)
    return Resolved(validate(root, values), values)


def load(root: type[Config], argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of `resolve` alone."""
    return resolve(root, argv, environment).config


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


def share_sections(values: Values, root: type[BaseModel]) -> None:
    """Switch optional sections on or off together: `--ckpt` at the root is `[ckpt]` of every component.

    Raises: ConfigError naming both places where one is on and another is off.
    """
    for root_key, component_keys in getattr(root, "shared_sections", {}).items():
        places = [_split(key) for key in (root_key, *component_keys)]
        given = {path: found[0] for path in places if (found := _lookup(values.tree, path))}
        on = [path for path, value in given.items() if isinstance(value, dict)]
        off = [path for path, value in given.items() if value in (None, "None")]
        if on and off:
            raise ConfigError(
                f"{dotted(on[0])} is on ({values.origin(on[0])}) but {dotted(off[0])} is off "
                f"({values.origin(off[0])}); they are one switch: set {root_key} only"
            )
        for path in places if on or off else ():
            if path not in given:
                _put(values, path, {} if on else None, values.origin((on or off)[0]))


def share(values: Values, root: type[BaseModel]) -> None:
    """Write every shared fact once: the root fills the components, and a component's value is lifted to the root.

    For each root key: the places that have a value must agree (else ConfigError names both); then every place has it.
    An optional section that is off stays off.
    """
    for root_key, component_keys in getattr(root, "shared", {}).items():
        places = [_split(key) for key in (root_key, *component_keys)]
        given = [(path, found[0]) for path in places if (found := _lookup(values.tree, path))]
        if not given:
            continue
        first_path, value = given[0]
        for path, other in given[1:]:
            if str(other) != str(value):
                raise ConfigError(
                    f"{dotted(first_path)} is {value!r} ({values.origin(first_path)}) but {dotted(path)} is "
                    f"{other!r} ({values.origin(path)}); they are one value: set {root_key} only"
                )
        origin = values.origin(first_path)
        for path in places:
            if not _is_off(values, root, path):
                _put(values, path, value, origin)


def _is_off(values: Values, root: type[BaseModel], path: Path) -> bool:
    """Whether a section around `path` is optional and not there."""
    sections = (path[:end] for end in range(1, len(path)))
    return any(is_switch(root, section) and values.get(section) is None for section in sections)


def _split(key: str) -> Path:
    return tuple(key.split("."))


def dotted(path: Path) -> str:
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
    """The configuration as TOML, every key spelled out, so that it loads back to itself whatever the defaults are.

    What the root shares with its components is written once, at the root, so that a flag can still change it.
    """
    tree = config.model_dump(mode="json")
    for keys in (getattr(config, "shared", {}), getattr(config, "shared_sections", {})):
        for root_key, component_keys in keys.items():
            for key in component_keys:
                _drop_copy(tree, _split(root_key), _split(key))
    return tomli_w.dumps(_plain(tree))


def _drop_copy(tree: dict[str, Any], original: Path, copy: Path) -> None:
    around = _lookup(tree, copy[:-1])
    if around and isinstance(around[0], dict) and copy[-1] in around[0]:
        first = _lookup(tree, original)
        if first and first[0] == around[0][copy[-1]]:
            del around[0][copy[-1]]


def write_toml(config: BaseModel, path: FilePath) -> None:
    """Write `to_toml(config)` to `path`, atomically, for its owner's eyes only: it may hold a server's key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_text(to_toml(config), encoding="utf-8")
    temporary.replace(path)


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return "None" if node is None else node
