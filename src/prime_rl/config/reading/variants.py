"""Sections of several types: which of them a table is, and what a change of type leaves behind."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.config.schema import Kind, Path, default_of, field_at, fields_of, find, target_of
from prime_rl.config.values import Values, dotted

Sections = tuple[type[BaseModel], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a merged mapping, with the section that it is."""

    path: Path
    values: dict[str, Any]
    options: Sections
    """The sections that may stand here."""
    default_type: str | None
    """Of several: the one that a table without `type` is."""

    @property
    def section(self) -> type[BaseModel] | None:
        """The only one, or the one that `type` names; None where that names none."""
        if len(self.options) == 1:
            return self.options[0]
        return next((option for option in self.options if type_of(option) == self.type), None)

    @property
    def type(self) -> Any:
        """The type that is named, or the default."""
        return self.values.get("type", self.default_type)


def type_of(section: type[BaseModel]) -> str:
    """The `type` that names one section of several."""
    return str(section.model_fields["type"].default)


def tables(section: type[BaseModel], values: Mapping[str, Any], path: Path = ()) -> Iterator[Table]:
    """Every table below `values`, which is one of `section`; the outer before the inner."""
    fields = section.model_fields
    for name, field in [(name, fields[name]) for name in values if name in fields]:
        for at, value in _entries(field, values[name], (*path, name)):
            default_type = getattr(default_of(field), "type", None)
            table = Table(at, value, target_of(field.annotation).sections, default_type)
            yield table
            if table.section:
                yield from tables(table.section, value, at)


def _entries(field: FieldInfo, value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    target = target_of(field.annotation)
    is_list = target.kind is Kind.LIST and isinstance(value, list)
    for at, entry in [((*path, index), entry) for index, entry in enumerate(value)] if is_list else [(path, value)]:
        if target.sections and isinstance(entry, dict):
            yield at, entry


def owners(options: Sections, key: str) -> list[str]:
    """The types that have `key`."""
    return [type_of(option) for option in options if key in option.model_fields] if len(options) > 1 else []


def chosen_type(root: type[BaseModel], values: Values, section: Path) -> Any:
    """The `type` of a section that may be of several: the one that `values` name, or the default."""
    field = field_at(root, section)
    default_type = getattr(default_of(field), "type", None) if field else None
    return values.get((*section, "type"), default=default_type)


def chosen_field(root: type[BaseModel], values: Values, path: Path) -> FieldInfo | None:
    """As `field_at`, where the section around the key may be of several types: the field of the chosen one."""
    around = find(root, path[:-1])
    if around is None or len(around.sections) < 2:
        return field_at(root, path)
    chosen = chosen_type(root, values, path[:-1])
    of_type = [section for section in around.sections if type_of(section) == chosen]
    return fields_of(tuple(of_type)).get(str(path[-1]))


def leave_out_keys_of_other_types(root: type[BaseModel], values: Values) -> None:
    """Drop what a weaker source says of another type than the one that a stronger source sets, with a notice."""
    for table in list(tables(root, values.tree)):
        strength = values.layer_of((*table.path, "type"))
        foreign = [
            (*table.path, key)
            for key in table.values
            if table.section and key not in table.section.model_fields and key in fields_of(table.options)
        ]
        weaker = [path for path in foreign if values.layer_of(path) < strength]
        if weaker:
            left_out = ", ".join(f"{path[-1]} ({values.origin(path)})" for path in weaker)
            of_type = (*table.path, "type")
            values.notices.append(
                f"{dotted(of_type)} is {table.type} ({values.origin(of_type)}), which leaves out {left_out}"
            )
        for path in weaker:
            values.remove(path)
