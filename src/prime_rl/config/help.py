"""The text of `--help`, made from the schema: `--help` is short, `--help SECTION` shows one section whole."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.config.schema import Kind, Path, find, is_optional, members, target_of
from prime_rl.config.sources import unknown_key
from prime_rl.errors import ConfigError

SOURCES = """\
Values come from, last wins: defaults, PRIME_ variables (PRIME_MODEL__NAME=x), TOML files (@ file.toml), flags
(--model.name x). --section @ file.toml reads a file into a section. --help SECTION shows a section's keys."""


def help_text(root: type[BaseModel], command: str, section: str | None = None) -> str:
    """What `command --help [section]` prints. ConfigError for a section that does not exist."""
    path: Path = tuple(section.replace("-", "_").split(".")) if section else ()
    target = find(root, path)
    if target is None or target.kind not in (Kind.SECTION, Kind.LIST):
        raise ConfigError(unknown_key(root, path, f"--help {section}"))
    lines = [f"usage: {command} [@ file.toml ...] [--key value ...]", ""]
    for cls in target.sections:
        lines += [_summary(cls), "", *_rows(cls, path), ""]
    return "\n".join([*lines, SOURCES])


def _summary(cls: type[BaseModel]) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _rows(cls: type[BaseModel], path: Path) -> Iterator[str]:
    fields = cls.model_fields.items()
    plain = [(name, field) for name, field in fields if not target_of(field.annotation).sections]
    nested = [(name, field) for name, field in fields if target_of(field.annotation).sections]
    for name, field in plain:
        yield f"  {flag(path, name)} {_type(field)}  (default: {_default(field)})"
        if field.description:
            yield f"      {' '.join(field.description.split())}"
    if nested:
        yield "\nsections:"
    for name, field in nested:
        about = field.description or _summary(target_of(field.annotation).sections[0])
        off = "  (off by default)" if is_optional(field.annotation) and field.default is None else ""
        yield f"  {flag(path, name)}.*  {' '.join(about.split())}{off}"


def flag(path: Path, name: str) -> str:
    """The command-line spelling of a key."""
    return "--" + ".".join([*map(str, path), name]).replace("_", "-")


def _type(field: FieldInfo) -> str:
    return "|".join(_type_name(option) for option in members(field.annotation)) or "None"


def _type_name(option: Any) -> str:
    if get_origin(option) is Literal:
        return "|".join(str(value) for value in get_args(option))
    if get_origin(option) in (list, tuple):
        return f"{_type_name(get_args(option)[0])},..."
    return str(getattr(get_origin(option) or option, "__name__", option)).upper()


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
