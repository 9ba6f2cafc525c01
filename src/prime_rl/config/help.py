"""The text of `--help`, made from the schema: `--help` is short, `--help SECTION` shows one section whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.config.pending import note, note_at
from prime_rl.config.reading.sources import unknown_key
from prime_rl.config.schema import Path, default_of, documentation, field_at, find, is_optional, members, target_of
from prime_rl.errors import ConfigError

SOURCES = """\
Values come from, last wins: defaults, PRIME_ variables (PRIME_MODEL__NAME=x), TOML files (@ file.toml), flags
(--model.name x). --section @ file.toml reads a file into a section. A section that is off is switched on by --section
and off again by --no-section.

  --help SECTION    a section's keys, like: --help {example}
  --explain KEY     a key's value, and where it came from
  --dry-run         check everything, write the resolved configuration of each process, start nothing"""

STATUS = """
  --status [DIR]    how the run in DIR is: who is at what, who waits for whom since when, and what happened"""

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

EXAMPLES = {"rl": "trainer.optim", "trainer": "optim", "sft": "data", "orchestrator": "sampling", "inference": "server"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as help and reference show it."""

    name: str
    type: str
    default: str
    text: str


def entry(name: str, field: FieldInfo, about: str = "") -> Entry:
    """How a key is shown. `about`: its documentation."""
    return Entry(name, _type(field), _default(field), " ".join(about.split()))


def help_text(root: type[BaseModel], command: str, section: str | None = None) -> str:
    """What `command --help [section]` prints. ConfigError for a section that does not exist."""
    path: Path = tuple(section.removeprefix("--").replace("-", "_").split(".")) if section else ()
    target = find(root, path)
    if target is None:
        raise ConfigError(unknown_key(root, path, f"--help {section}"))
    lines = [f"usage: {command} [@ file.toml ...] [--key value ...]", ""]
    if not target.sections and (field := field_at(root, path)) is not None:
        about = entry(str(path[-1]), field, describe(root, path))
        lines += [*_row(path[:-1], about, note_at(root, path)), ""]
    for cls in target.sections:
        kind = str(cls.model_fields["type"].default) if len(target.sections) > 1 else ""
        later = note_at(root, path, kind)
        lines += [f"type {kind}: {summary(cls)}" if kind else summary(cls), *([later] if later else [])]
        lines += ["", *_rows(cls, path), ""]
    sources = SOURCES.format(example=EXAMPLES.get(command, "model"))
    return "\n".join([*lines, sources + (STATUS if command == "rl" else "")])


def describe(root: type[BaseModel], path: Path, chosen: type[BaseModel] | None = None) -> str:
    """The documentation of the key that `path` ends at; that of its section, `chosen` of several, where it has none."""
    owner, target = find(root, path[:-1]), find(root, path)
    texts = [documentation(cls).get(str(path[-1]), "") for cls in owner.sections] if owner else []
    sections = (chosen,) if chosen else target.sections if target else ()
    return next(filter(None, [*texts, *map(summary, sections)]), "")


def summary(cls: type[BaseModel]) -> str:
    """The first paragraph of a section's documentation."""
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _rows(cls: type[BaseModel], path: Path) -> Iterator[str]:
    """Plain keys, then switches, then sections."""
    texts = documentation(cls)
    fields = cls.model_fields.items()
    nested = [(name, field) for name, field in fields if target_of(field.annotation).sections]
    for name, field in fields:
        if not target_of(field.annotation).sections:
            yield from _row(path, entry(name, field, texts[name]), note(cls, name))
    if nested:
        yield "\nsections:"
    for name, field in nested:
        about = texts[name] or summary(target_of(field.annotation).sections[0])
        off = "  (off by default)" if field.default is None and is_optional(field.annotation) else ""
        yield f"  {flag(path, name)}.*  {' '.join(filter(None, [about, note(cls, name)]))}{off}"


def _row(path: Path, about: Entry, later: str) -> Iterator[str]:
    yield f"  {flag(path, about.name)} {about.type}  (default: {about.default})"
    if text := " ".join(filter(None, [about.text, later])):
        yield f"      {text}"


def flag(path: Path, name: str) -> str:
    """The command-line spelling of a key."""
    return "--" + ".".join([*map(str, path), name]).replace("_", "-")


def _type(field: FieldInfo) -> str:
    return ("|".join(_type_name(option) for option in members(field.annotation)) or "None") + _bounds(field)


def _bounds(field: FieldInfo) -> str:
    """The range of a value, as ` >= 1` or ` 0 to 1`."""
    bounds = {name: getattr(rule, name) for rule in _rules(field) for name in _SIGNS if hasattr(rule, name)}
    if bounds.keys() == {"ge", "le"}:
        return f" {bounds['ge']} to {bounds['le']}"
    return " and".join(f" {_SIGNS[name]} {bound}" for name, bound in bounds.items())


def _rules(field: FieldInfo) -> Iterator[Any]:
    """What pydantic was told besides the type, at the field or at an alternative of its type."""
    yield from field.metadata
    for option in get_args(field.annotation):
        for rule in option.__metadata__ if get_origin(option) is Annotated else ():
            yield from getattr(rule, "metadata", [rule])


def _type_name(option: Any) -> str:
    if get_origin(option) is Literal:
        return "|".join(str(value) for value in get_args(option))
    if get_origin(option) is dict:
        return "TABLE"
    if get_origin(option) in (list, tuple):
        return f"{_type_name(get_args(option)[0])},..."
    return str(getattr(get_origin(option) or option, "__name__", option)).upper()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    return on_command_line(default_of(field))


def on_command_line(value: Any) -> str:
    """A value as it is written behind a flag."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(map(on_command_line, value)) or "[]"
    return str(value)
