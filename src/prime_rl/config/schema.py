"""Questions about a configuration class: what a dotted path leads to, and which keys there are."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]


class Kind(Enum):
    """How the command line reads a value."""

    SECTION = "section"
    """A nested table."""
    FLAG = "flag"
    """True by its mere presence, false as --no-name."""
    LIST = "list"
    """Several values: `1,2,3`, `1 2 3` or JSON."""
    MAPPING = "mapping"
    """A free table: JSON or a Python literal."""
    SCALAR = "scalar"
    """One value."""
    FREE = "free"
    """A value inside a free table: whatever it looks like."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a path leads to: how to read a value for it, and the section classes it may be."""

    kind: Kind
    sections: tuple[type[BaseModel], ...] = ()


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, unwrapped of `Annotated` and unions; None is left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from members(argument)
    elif annotation is not type(None):
        yield annotation


def is_optional(annotation: Any) -> bool:
    """Whether None is a value of the annotation."""
    if get_origin(annotation) is Annotated:
        return is_optional(get_args(annotation)[0])
    return type(None) in get_args(annotation)


def target_of(annotation: Any) -> Target:
    """How values of this annotation are written."""
    options = list(members(annotation))
    sections = tuple(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    if sections:
        return Target(Kind.SECTION, sections)
    origins = {get_origin(option) or option for option in options}
    if origins & {list, tuple}:
        items = [argument for option in options for argument in get_args(option) if argument is not Ellipsis]
        return Target(Kind.LIST, tuple(i for i in items if isinstance(i, type) and issubclass(i, BaseModel)))
    if dict in origins:
        return Target(Kind.MAPPING)
    return Target(Kind.FLAG if bool in origins else Kind.SCALAR)


def fields_of(sections: tuple[type[BaseModel], ...]) -> dict[str, FieldInfo]:
    """The fields of a section; of alternatives, all of theirs."""
    return {name: field for section in sections for name, field in section.model_fields.items()}


def find(root: type[BaseModel], path: Path) -> Target | None:
    """What `path` leads to in `root`; None where there is no such key. Keys below a free table are all scalars."""
    target = Target(Kind.SECTION, (root,))
    for part in path:
        if target.kind in (Kind.MAPPING, Kind.FREE):
            return Target(Kind.FREE)
        if target.kind is Kind.LIST and str(part).isdigit():
            target = Target(Kind.SECTION, target.sections)
            continue
        if target.kind is Kind.LIST and len(target.sections) == 1:
            target = Target(Kind.SECTION, target.sections)  # --env.id x: the first entry
        field = fields_of(target.sections).get(str(part)) if target.kind is Kind.SECTION else None
        if field is None:
            return None
        target = target_of(field.annotation)
    return target


def keys_at(root: type[BaseModel], path: Path) -> list[str]:
    """The keys that `path` may be followed by."""
    target = find(root, path)
    return sorted(fields_of(target.sections)) if target else []


def all_keys(root: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Every dotted key, sections included, depth first."""
    for name, field in root.model_fields.items():
        path = (*prefix, name)
        yield ".".join(path)
        for section in target_of(field.annotation).sections:
            yield from all_keys(section, path)
