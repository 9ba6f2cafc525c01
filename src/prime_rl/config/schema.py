"""Questions about a configuration class: what a dotted path leads to, and which keys there are."""

import ast
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

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
        items = [item for option in options for argument in get_args(option) for item in members(argument)]
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
        if target.kind is Kind.LIST and re.fullmatch("[0-9]+", str(part)):
            target = Target(Kind.SECTION, target.sections)
            continue
        if target.kind is Kind.LIST and target.sections:
            target = Target(Kind.SECTION, target.sections)  # --env.id x: the first entry
        field = fields_of(target.sections).get(str(part)) if target.kind is Kind.SECTION else None
        if field is None:
            return None
        target = target_of(field.annotation)
    return target


def field_at(root: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field that `path` ends at; None for an entry of a list or free table, and where there is none."""
    target = find(root, path[:-1])
    if not path or target is None:
        return None
    return fields_of(target.sections).get(str(path[-1]))


def default_of(field: FieldInfo) -> Any:
    """The value of a key that is not set, made anew where it is a section."""
    return field.get_default(call_default_factory=True)


def is_switch(root: type[BaseModel], path: Path) -> bool:
    """Whether `path` is an optional section that is off by default: `--name` switches it on."""
    field = field_at(root, path)
    return field is not None and field.default is None and bool(target_of(field.annotation).sections)


def keys_at(root: type[BaseModel], path: Path) -> list[str]:
    """The keys that `path` may be followed by."""
    target = find(root, path)
    return sorted(fields_of(target.sections)) if target else []


def all_sections(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`root` and every section below it, depth first; a class that is used twice comes twice."""
    yield root
    for field in root.model_fields.values():
        for section in target_of(field.annotation).sections:
            yield from all_sections(section)


def all_keys(root: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Every dotted key, sections included, depth first."""
    for name, field in root.model_fields.items():
        path = (*prefix, name)
        yield ".".join(path)
        for section in target_of(field.annotation).sections:
            yield from all_keys(section, path)


@functools.cache
def documentation(cls: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field of a section, in one line; "" for a field without. Inherited fields included."""
    texts = dict.fromkeys(cls.model_fields, "")
    for owner in reversed(cls.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            texts |= {name: text for name, text in _written_under_fields(owner).items() if name in texts}
    return texts


def _written_under_fields(cls: type[BaseModel]) -> dict[str, str]:
    body = next((node.body for node in _module(cls.__module__).body if _is_class(node, cls.__name__)), [])
    texts: dict[str, str] = {}
    for node, following in itertools.pairwise(body):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def _is_class(node: ast.stmt, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and node.name == name


@functools.cache
def _module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))
