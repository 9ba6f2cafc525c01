"""The text of `--explain KEY`: a key's value, where it came from, and its documentation.

    optim.lr = 0.002
      from: rl.toml:4
      type: FLOAT >= 0, default 1e-06
      Learning rate at its peak.

Of a section or a list of tables, every key in it; of a key without a value, why it has none.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from prime_rl.config.compat.translation import kind, renamed
from prime_rl.config.help import describe, entry, flag
from prime_rl.config.load import Resolved
from prime_rl.config.pending import note_at
from prime_rl.config.reading.sources import unknown_key
from prime_rl.config.reading.spelling import canonical
from prime_rl.config.reading.variants import owners, type_of
from prime_rl.config.schema import Path, field_at, find, is_optional
from prime_rl.config.values import dotted
from prime_rl.config.writing import in_toml
from prime_rl.errors import ConfigError


def explain(root: type[BaseModel], resolved: Resolved[Any], key: str) -> str:
    """What `--explain key` prints. Raises: ConfigError for an unknown key, or an entry that a list does not have."""
    path = canonical(root, renamed(root, canonical(root, tuple(key.removeprefix("--").split(".")))))
    if find(root, path) is None:
        if kind(root, path) is not None:
            return f"{key} is an older key, which sets others: the notice of a command that has it names them"
        raise ConfigError(unknown_key(root, path, f"--explain {key}"))
    end, value = _reach(resolved.config, path)
    if end < len(path):
        lines = _without_value(root, resolved, path, end)
    elif isinstance(value, BaseModel):
        lines = _section(root, resolved, path, value)
    elif inside := _inside(value):
        number = "1 entry" if len(inside) == 1 else f"{len(inside)} entries"
        lines = [f"{dotted(path)}: {number}", _from(resolved, path), *_about(root, path)]
        lines += _leaves(resolved, value, path)
    else:
        is_off = value is None and _is_section(root, path)
        lines = [f"{dotted(path)} = {in_toml(value)}{' (off)' if is_off else ''}", _from(resolved, path)]
        lines += [*_about(root, path), *([_how_to_switch_on(path)] if is_off else [])]
    return "\n".join(lines)


def _reach(config: object, path: Path) -> tuple[int, object]:
    """How many parts of `path` lead to something, and to what."""
    for end, part in enumerate(path):
        inside = _inside(config)
        if part not in inside:
            return end, config
        config = inside[part]
    return len(path), config


def _inside(value: object) -> dict[str | int, object]:
    """What a section, a list of tables or a free table holds."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def _without_value(root: type[BaseModel], resolved: Resolved[Any], path: Path, end: int) -> list[str]:
    """Why nothing is at `path`, of which the first `end` parts lead to something."""
    around, (_, value) = path[:end], _reach(resolved.config, path)
    place = _origin(resolved, around)
    if isinstance(value, tuple):
        raise ConfigError(f"{dotted(around)} has no entry {path[end]}: there {_are(len(value))} ({place})")
    if value is None:
        lines = [f"{dotted(path)} has no value: {dotted(around)} is off ({place})", _how_to_switch_on(around)]
    elif isinstance(value, BaseModel):
        options = find(root, around)
        types = " or ".join(owners(options.sections, str(path[end]))) if options else ""
        of_type, place = (*around, "type"), _origin(resolved, (*around, "type"))
        lines = [
            f"{dotted(path)} has no value: {dotted(of_type)} is {type_of(type(value))} ({place})",
            f"  it is a key of {dotted(of_type)} {types}: choose that with {flag(around, 'type')} ...",
        ]
    else:
        lines = [f"{dotted(path)} is not set: {dotted(around)} is a free table ({place})"]
    return [*lines, *_about(root, path)]


def _section(root: type[BaseModel], resolved: Resolved[Any], path: Path, value: BaseModel) -> list[str]:
    field = field_at(root, path)
    is_switch = field is not None and is_optional(field.annotation)
    lines = [f"[{dotted(path)}]{' is on' if is_switch else ''}"]
    lines += [_from(resolved, path)] if is_switch else []
    return [*lines, *_about(root, path, type(value)), *_leaves(resolved, value, path)]


def _about(root: type[BaseModel], path: Path, chosen: type[BaseModel] | None = None) -> list[str]:
    """Type, default and documentation of a key; of a section, which may be of the type `chosen`, documentation."""
    field, text = field_at(root, path), describe(root, path, chosen)
    about = entry(str(path[-1]), field, text) if field is not None and not _is_section(root, path) else None
    of_type = type_of(chosen) if chosen and "type" in chosen.model_fields else ""
    lines = [f"type: {about.type}, default {about.default}" if about else "", text, note_at(root, path, of_type)]
    return [f"  {line}" for line in lines if line]


def _leaves(resolved: Resolved[Any], value: object, path: Path) -> Iterator[str]:
    """Every key below `path` with its value and place."""
    inside = _inside(value)
    if not inside:
        yield f"{dotted(path)} = {in_toml(value)}  ({_origin(resolved, path)})"
    for name, item in inside.items():
        yield from _leaves(resolved, item, (*path, name))


def _is_section(root: type[BaseModel], path: Path) -> bool:
    target = find(root, path)
    return target is not None and bool(target.sections)


def _are(number: int) -> str:
    return "is 1" if number == 1 else f"are {number}"


def _from(resolved: Resolved[Any], path: Path) -> str:
    return f"  from: {_origin(resolved, path)}"


def _origin(resolved: Resolved[Any], path: Path) -> str:
    """Where the value of a key was written; a table around it does not count."""
    return resolved.values.origin(path) if resolved.values.has(path) else "default"


def _how_to_switch_on(path: Path) -> str:
    key = dotted(path)
    return (
        f"  switch it on with {flag(path[:-1], str(path[-1]))}, or with [{key}] in a file; --help {key} tells its keys"
    )
