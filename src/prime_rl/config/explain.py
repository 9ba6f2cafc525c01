"""The text of `--explain KEY`: a key's value, where it came from, and its documentation."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from prime_rl.config.help import describe, entry, summary
from prime_rl.config.load import Resolved
from prime_rl.config.schema import Path, field_at, find
from prime_rl.config.sources import unknown_key
from prime_rl.config.spelling import canonical
from prime_rl.config.translation import renamed
from prime_rl.config.values import dotted
from prime_rl.errors import ConfigError


def explain(root: type[BaseModel], resolved: Resolved[Any], key: str) -> str:
    """What `--explain key` prints; for a section, every key in it. Raises: ConfigError for an unknown key."""
    path = renamed(root, canonical(root, tuple(key.removeprefix("--").split("."))))
    if find(root, path) is None:
        raise ConfigError(unknown_key(root, path, f"--explain {key}"))
    value = _value(resolved.config, path)
    if isinstance(value, BaseModel):
        lines = [f"[{dotted(path)}]  {summary(type(value))}"]
        for leaf, found in _leaves(value, path):
            lines.append(f"{dotted(leaf)} = {found!r}  ({_origin(resolved, leaf)})")
        return "\n".join(lines)
    lines = [f"{dotted(path)} = {value!r}", f"  from: {_origin(resolved, path)}"]
    field = field_at(root, path)
    if field is not None:
        about = entry(str(path[-1]), field, describe(root, path))
        lines += [f"  type: {about.type}, default {about.default}", f"  {about.text}"]
    return "\n".join(lines)


def _origin(resolved: Resolved[Any], path: Path) -> str:
    """Where the value of a key was written; a table around it does not count."""
    return resolved.values.origin(path) if resolved.values.has(path) else "default"


def _value(config: object, path: Path) -> object:
    """The value at `path`; None below a section that is off."""
    for part in path:
        if isinstance(config, dict):
            config = config.get(part)
        elif isinstance(config, tuple):
            config = _entry(config, part)
        else:
            config = getattr(config, str(part), None)
    return config


def _entry(values: tuple[object, ...], part: str | int) -> object:
    if isinstance(part, int):
        return values[part] if part < len(values) else None
    return _value(values[0], (part,)) if values else None  # env.id: the first entry


def _leaves(section: BaseModel, path: Path) -> Iterator[tuple[Path, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
