"""Applies the table of older spellings (`config.compat.table`) to single settings, before they are merged.

So precedence between an old and a new spelling in different places stays what it would be if both were new.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from prime_rl.config.compat.old_values import Found, truth
from prime_rl.config.compat.table import OLD, Entry, Gone, Refused, Repair, Rule, To
from prime_rl.config.schema import Kind, Path, field_at, find, is_optional, target_of
from prime_rl.config.values import Setting, Values
from prime_rl.errors import ConfigError

Notice = tuple[str, str]
"""The place in a file (empty for a flag, which names itself), and what to say of it."""

_PROCESSES = {"TrainerConfig", "SFTConfig", "OrchestratorConfig", "InferenceConfig", "EvalConfig"}
"""Classes that are the root of a process's own file."""

_MAX_ROUNDS = 8
"""More renamings of one key than any has behind it."""

_find = functools.cache(find)


def translate(root: type[BaseModel], setting: Setting, values: Values) -> tuple[list[Setting], list[Notice]]:
    """The settings that `setting` stands for today, and what to tell the user.

    `values` is what is merged so far, for old keys that are a part of a new one.
    Raises: ConfigError for an old key whose value has no counterpart.
    """
    settings, notices = [setting], []
    for _ in range(_MAX_ROUNDS):
        found = [_apply(root, current, values) for current in settings]
        notices += [notice for _, notice in found if notice]
        before, settings = settings, [new for news, _ in found for new in news]
        if settings == before:
            return settings, notices
    raise AssertionError(f"{setting.path}: the table of older spellings runs in a circle")


def kind(root: type[BaseModel], path: Path) -> Kind | None:
    """How the command line reads an older key; None for one that is none, or has no counterpart."""
    for base, end, entry in _entries(root, path):
        tail = path[end:]
        if isinstance(entry, To):
            return kind_at(root, (*base, *_parts(entry.new), *tail))
        if isinstance(entry, Rule) and entry.kind is None:
            target = _find(root, (*base, *_parts(entry.like), *tail) if entry.like else path)
            return target.kind if target else None
        if isinstance(entry, Rule | Gone) and entry.kind is not None:
            holds_any = entry.kind in (Kind.SECTION, Kind.MAPPING)
            return entry.kind if not tail else Kind.FREE if holds_any else None
    return Kind.SECTION if _is_around_old_keys(root, path) else None


def kind_at(root: type[BaseModel], path: Path) -> Kind | None:
    """How the command line reads a key, of today or older; None where there is none."""
    target = _find(root, path)
    return target.kind if target else kind(root, path)


def renamed(root: type[BaseModel], path: Path) -> Path:
    """The path under today's names, as far as it stood under older ones."""
    for _ in range(_MAX_ROUNDS):
        new = next(
            ((*base, *_parts(e.new), *path[end:]) for base, end, e in _entries(root, path) if isinstance(e, To)), path
        )
        if new == path:
            break
        path = new
    return path


def hint(root: type[BaseModel], path: Path) -> str | None:
    """What to do instead of an old key that has no counterpart."""
    hints = (entry.hint for _, _, entry in _entries(root, path) if isinstance(entry, Refused))
    return next(hints, None)


def old_keys(root: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Every older spelling below `root` that still works, dotted; vLLM's names included."""
    for key, entry in _table(root).items():
        if not isinstance(entry, Refused):
            yield ".".join((*prefix, key))
    for name, field in root.model_fields.items():
        for section in target_of(field.annotation).sections:
            yield from old_keys(section, (*prefix, name))


@functools.cache
def _table(cls: type[BaseModel]) -> dict[str, Entry]:
    """The entries of a class and of those that it is derived from; a key of its own is not old."""
    entries: dict[str, Entry] = {}
    for owner in reversed(cls.__mro__):
        entries |= OLD.get(owner.__name__, {})
    return {key: entry for key, entry in entries.items() if isinstance(entry, Rule | Repair) or not _is_key(cls, key)}


def _is_key(cls: type[BaseModel], key: str) -> bool:
    target = _find(cls, _parts(key))
    return target is not None and target.kind is not Kind.FREE


def _entries(root: type[BaseModel], path: Path) -> Iterator[tuple[Path, int, Entry]]:
    """Entries for `path` or a table around it: where the class sits, the end of the old key in `path`, the entry."""
    for start in range(len(path)):
        target = _find(root, path[:start])
        if target is None:
            return
        for section in target.sections if target.kind is Kind.SECTION else ():
            for end in range(len(path), start, -1):
                entry = _table(section).get(_dotted(path[start:end]))
                if entry is not None:
                    yield path[:start], end, entry


def _is_around_old_keys(root: type[BaseModel], path: Path) -> bool:
    """Whether `path` is no key itself, but a table that old keys stood in."""
    for start in range(len(path)):
        target = _find(root, path[:start])
        around = f"{_dotted(path[start:])}."
        if target and any(key.startswith(around) for section in target.sections for key in _table(section)):
            return _find(root, path) is None
    return False


def _apply(root: type[BaseModel], setting: Setting, values: Values) -> tuple[list[Setting], Notice | None]:
    """One round of `translate`: the setting itself where no entry has anything to say."""
    for base, end, entry in _entries(root, setting.path):
        old_key, tail = setting.path[:end], setting.path[end:]
        if isinstance(entry, To):
            new = (*base, *_parts(entry.new))
            renamed = replace(setting, path=(*new, *tail))
            shown = _name(root, renamed.path if setting.is_flag else new, setting)
            return [renamed], _notice(root, setting, old_key, f"is now {shown}") if entry.is_old else None
        if isinstance(entry, Rule) and (not tail or entry.is_table):
            writes = entry.write(Found(setting=setting, base=base, tail=tail, values=values))
            if writes is not None:
                settings = [replace(setting, path=(*base, *path), value=value) for path, value in writes]
                says = _written(root, settings) or entry.says
                return settings, _notice(root, setting, old_key, f"is now {says}") if entry.is_old and says else None
        if isinstance(entry, Repair) and not tail and (value := entry.read(setting.value)) != setting.value:
            return [replace(setting, value=value)], _notice(
                root, setting, old_key, f"{_text(setting.value)} is read as {_text(value)}"
            )
        if isinstance(entry, Gone) and (not tail or entry.kind is Kind.SECTION):
            if not entry.accepts(setting.value):
                says = f"{_text(setting.value)} has no counterpart: {entry.instead}"
                raise ConfigError(": ".join(filter(None, _notice(root, setting, old_key, says))))
            return [], _notice(root, setting, old_key, f"is gone: {entry.instead}")
    if setting.value == {} and _is_around_old_keys(root, setting.path):
        return [], None
    return _switched(root, setting)


def _switched(root: type[BaseModel], setting: Setting) -> tuple[list[Setting], Notice | None]:
    """An optional section was a mere switch once: `ac = true`."""
    field, value = field_at(root, setting.path), truth(setting.value)
    if not isinstance(value, bool) or field is None or not is_optional(field.annotation):
        return [setting], None
    if target_of(field.annotation).kind is not Kind.SECTION:
        return [setting], None
    says = f"is a table now: {_text(value)} is read as {'an empty one' if value else 'none'}"
    return [replace(setting, value={} if value else None)], _notice(root, setting, setting.path, says)


def _notice(root: type[BaseModel], setting: Setting, key: Path, says: str) -> Notice:
    if setting.is_flag:
        return "", f"{setting.origin} {says}"
    return setting.origin, f"{_name(root, key, setting)} {says}"


def _written(root: type[BaseModel], settings: list[Setting]) -> str:
    """Settings as the user would write them: flags, or lines of a file."""
    shown = [setting for setting in settings if setting.value != []]
    if shown and shown[0].is_flag:
        return " ".join(f"{_name(root, s.path, s)} {_text(s.value)}" for s in shown)
    return ", ".join(f"{_name(root, s.path, s)} = {_text(s.value)}" for s in shown)


def _name(root: type[BaseModel], path: Path, setting: Setting) -> str:
    """A key as a flag, or as it would stand in the file of its process."""
    if setting.is_flag:
        is_negated = setting.origin.startswith("--no-") and setting.value in (False, None)
        return f"{'--no-' if is_negated else '--'}{_dotted(path).replace('_', '-')}"
    for start in range(len(path) - 1, 0, -1):
        target = _find(root, path[:start])
        if target and any(section.__name__ in _PROCESSES for section in target.sections):
            return _dotted(path[start:])
    return _dotted(path)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parts(key: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
