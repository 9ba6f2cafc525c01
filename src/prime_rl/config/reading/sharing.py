"""Facts that several processes share are written once.

The root fills the components, and a value that is set on one component is lifted to the root and fills the others. A
stronger source wins as everywhere: a flag on the root changes what a file says of a component. Two values of one fact
in sources of one strength are an error that names both places.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from prime_rl.config.schema import Path, field_at, is_switch
from prime_rl.config.values import Values, dotted, split
from prime_rl.errors import ConfigError


def share_sections(values: Values, root: type[BaseModel]) -> None:
    """Switch optional sections on or off together: `--ckpt` at the root is `[ckpt]` of every component.

    Raises: ConfigError naming both places where one is on and another is off.
    """
    for root_key, component_keys in getattr(root, "shared_sections", {}).items():
        places = [split(key) for key in (root_key, *component_keys)]
        strongest = _strongest(values, places)
        on = [path for path in strongest if isinstance(values.get(path), dict)]
        off = [path for path in strongest if values.get(path) is None]
        if on and off:
            raise ConfigError(
                f"{dotted(on[0])} is on ({values.origin(on[0])}) but {dotted(off[0])} is off "
                f"({values.origin(off[0])}); they are one switch: set {root_key} only"
            )
        for path in places if on or off else ():
            if off:
                values.fill(path, None, off[0])
            elif values.get(path) is None:
                values.fill(path, {}, on[0])


def share(values: Values, root: type[BaseModel]) -> None:
    """Give every shared fact one value, everywhere but in optional sections that are off.

    Raises: ConfigError naming both places where two differ.
    """
    for root_key, component_keys in getattr(root, "shared", {}).items():
        places = [split(key) for key in (root_key, *component_keys)]
        strongest = _strongest(values, places)
        if not strongest:
            continue
        first, *others = strongest
        for path in others:
            if not _is_same(root, first, values.written(first), values.written(path)):
                raise ConfigError(
                    f"{dotted(first)} is {values.written(first)!r} ({values.origin(first)}) but {dotted(path)} is "
                    f"{values.written(path)!r} ({values.origin(path)}); they are one value: set {root_key} only"
                )
        for path in places:
            if path not in strongest and not _is_off(values, root, path):
                values.fill(path, values.written(first), first)


def _strongest(values: Values, places: Sequence[Path]) -> list[Path]:
    """Of the places that have a value, those whose source is the strongest."""
    given = [path for path in places if values.has(path)]
    top = max((values.layer_of(path) for path in given), default=0)
    return [path for path in given if values.layer_of(path) == top]


def _is_same(root: type[BaseModel], path: Path, one: Any, other: Any) -> bool:
    """Whether two values as they were written mean the same for the key at `path`."""
    if one == other:
        return True
    field = field_at(root, path)
    if field is None:
        return False
    annotation: Any = field.rebuild_annotation()
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        left, right = (adapter.validate_python(None if value == "None" else value) for value in (one, other))
    except ValidationError:
        return False
    return bool(left == right)


def _is_off(values: Values, root: type[BaseModel], path: Path) -> bool:
    """Whether a section around `path` is optional and not there."""
    sections = (path[:end] for end in range(1, len(path)))
    return any(is_switch(root, section) and values.get(section) is None for section in sections)
