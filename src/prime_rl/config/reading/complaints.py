"""What pydantic found wrong, in words for somebody who writes a configuration.

Every complaint names the key, what it should be, and the place where it was written. One about keys that do not go
together (`Conflict`) says the fix first, then a line for each of them:

    batch_size must be divisible by rollouts_per_example; try batch_size 32
      orchestrator.batch_size = 40 (--orchestrator.batch-size)
      orchestrator.rollouts_per_example = 16 (rl.toml:31)
"""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prime_rl.config.conflict import Conflict
from prime_rl.config.reading.sources import unknown_key
from prime_rl.config.reading.variants import chosen_field, chosen_type, owners, type_of
from prime_rl.config.schema import Kind, Path, Target, default_of, field_at, find, keys_at, members, target_of
from prime_rl.config.values import Values, dotted
from prime_rl.config.writing import in_toml

MAX_KEYS = 8
"""Most keys of a section that are named; `--help` shows those of larger ones."""

MAX_SHOWN = 80
"""Most characters of a value that are shown."""

_MUST_BE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "dict_type": "a table, like {{key = 1}}",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "greater_than": "above {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "below {lt}",
    "too_short": "a list that is not empty",
}


def complaints(root: type[BaseModel], values: Values, error: ValidationError) -> list[str]:
    """One complaint for each mistake, those of outer sections first.

    A shared value that is wrong in several places was written once, and is complained of once.
    """
    found: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors():
        found.setdefault(_written_path(root, values, details["loc"]), []).append(details)
    mistakes: list[tuple[Path, object, str]] = []
    for path, alternatives in found.items():
        conflict = alternatives[0].get("ctx", {}).get("error")
        if isinstance(conflict, Conflict):
            mistakes.append((path, *_conflict(root, values, path, conflict)))
        else:
            key, what = _complaint(root, values, path, alternatives)
            mistakes.append((key, (key[-1:], what), f"{dotted(key)}{what}"))
    once: dict[object, str] = {}
    for _, same, text in sorted(mistakes, key=lambda mistake: len(mistake[0])):
        once.setdefault(same, text)
    return list(once.values())


def _conflict(root: type[BaseModel], values: Values, path: Path, conflict: Conflict) -> tuple[object, str]:
    """What makes the conflict another than others, and its text."""
    keys = [(*path, *_parts(key)) for key in conflict.keys]
    facts = tuple(_fact(root, values, key) for key in keys)
    lines = [f"  {dotted(key)}{fact}" for key, fact in zip(keys, facts, strict=True)]
    return (str(conflict), facts), "\n".join([str(conflict), *lines])


def _written_path(root: type[BaseModel], values: Values, location: tuple[str | int, ...]) -> Path:
    """pydantic's location without what the user did not write: the types of sections, and alternatives of a value."""
    path: Path = ()
    target: Target | None = Target(Kind.SECTION, (root,))
    is_tag = False
    for part in location:
        if is_tag:
            is_tag = False
            continue
        is_free = target is not None and target.kind is Kind.MAPPING and not values.has((*path, part))
        if is_free or (target is not None and target.kind is Kind.SCALAR):
            break
        path = (*path, part)
        target = find(root, path)
        is_tag = target is not None and target.kind is Kind.SECTION and len(target.sections) > 1
    return path


def _parts(key: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _fact(root: type[BaseModel], values: Values, path: Path) -> str:
    """` = value (place)`; of a table the place alone."""
    if not values.has(path):
        field = chosen_field(root, values, path)
        return f" = {_shown(default_of(field) if field else None)} (default)"
    value = values.written(path)
    is_table = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    return f" ({values.origin(path)})" if is_table else f" = {_shown(value)} ({values.origin(path)})"


def _shown(value: Any) -> str:
    """A value as it is written in a file, but for the quotes of text."""
    if isinstance(value, bool):
        return str(value).lower()
    return _clipped(f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value))


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _complaint(root: type[BaseModel], values: Values, path: Path, alternatives: list[ErrorDetails]) -> tuple[Path, str]:
    """The key that is wrong, and what to say behind it; `alternatives` are of the types that the value may have."""
    details, origin = alternatives[0], values.origin(path)
    match details["type"]:
        case "extra_forbidden":
            unknown = unknown_key(root, path, origin).removeprefix(dotted(path))
            return path, _of_another_type(root, values, path) or unknown
        case "missing":
            return path, f": must be given ({values.origin(path[:-1])})"
        case "union_tag_not_found":
            return (*path, "type"), f": must be given, one of {', '.join(_types(root, path))} ({origin})"
        case "union_tag_invalid":
            path, types = (*path, "type"), _choice(_types(root, path))
            return path, f": must be {types}, got {_got(details['input']['type'])} ({values.origin(path)})"
        case "model_type" | "model_attributes_type":
            return path, f": {_table_wanted(root, path, details['input'], origin)}"
        case "value_error":
            return path, f": {details['msg'].removeprefix('Value error, ')} ({origin})"
        case _:
            must_be = " or ".join(dict.fromkeys(_must_be(root, path, found, origin) for found in alternatives))
            return path, f": must be {must_be}, got {_got(details['input'])} ({origin})"


def _got(value: Any) -> str:
    return "a table" if isinstance(value, dict) else _clipped(_shown(value) if isinstance(value, bool) else repr(value))


def _must_be(root: type[BaseModel], path: Path, details: ErrorDetails, origin: str) -> str:
    if details["type"] in ("tuple_type", "list_type"):
        return _list_wanted(root, path, origin)
    if pattern := _MUST_BE.get(details["type"]):
        limits = {name: _whole(limit) for name, limit in details.get("ctx", {}).items()}
        return pattern.format(**limits).replace("'", "")
    return details["msg"].removeprefix("Input should be ")


def _whole(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _of_another_type(root: type[BaseModel], values: Values, path: Path) -> str | None:
    """What to say of a key that its section has with another `type`."""
    target = find(root, path[:-1])
    types = owners(target.sections, str(path[-1])) if target else []
    if not types:
        return None
    of_type = (*path[:-1], "type")
    origin = values.origin(path)
    chosen = chosen_type(root, values, path[:-1])
    place = values.origin(of_type) if values.has(of_type) else "default"
    fix = _flag(of_type) if _is_flag(origin) else dotted(of_type)
    return (
        f" ({origin}) is a key of {dotted(of_type)} {_choice(types)}; {dotted(of_type)} is {chosen} "
        f"({place}): set {fix}"
    )


def _types(root: type[BaseModel], path: Path) -> list[str]:
    target = find(root, path)
    return [type_of(section) for section in target.sections] if target else []


def _table_wanted(root: type[BaseModel], path: Path, value: Any, origin: str) -> str:
    """What to say of a value where a section belongs, with the line to write."""
    keys = keys_at(root, path)
    names = f" with the keys {', '.join(keys)}" if len(keys) <= MAX_KEYS else ""
    said = f"is a table{names}, not {_got(value)} ({origin})"
    if isinstance(value, str) and value.endswith(".toml"):
        return f"{said}; to read a file into it, write {_flag(path)} @ {value}"
    (*section, key), example = _example(root, path, value)
    if _is_flag(origin):
        items = example if isinstance(example, list) else [example]
        return f"{said}; write {_flag((*section, key))} {','.join(map(_shown, items))}"
    return f"{said}; write [{dotted(tuple(section))}] with {key} = {in_toml(example)}"


def _example(root: type[BaseModel], path: Path, value: Any) -> tuple[Path, Any]:
    """A key below a section and a value for it: what `value` may have meant, else the first default there is."""
    target = find(root, path)
    assert target is not None
    if len(target.sections) > 1:
        types = _types(root, path)
        return (*path, "type"), value if value in types else types[0]
    fields = target.sections[0].model_fields
    first = next(iter(fields))
    if isinstance(value, str) and str in members(fields[first].annotation):
        return (*path, first), value
    for name, field in fields.items():
        default = None if target_of(field.annotation).sections or field.is_required() else default_of(field)
        if default is not None:
            return (*path, name), list(default) if isinstance(default, tuple) else default
    is_section = bool(target_of(fields[first].annotation).sections)
    return _example(root, (*path, first), value) if is_section else ((*path, first), value)


def _list_wanted(root: type[BaseModel], path: Path, origin: str) -> str:
    target, field = find(root, path), field_at(root, path)
    if target and target.sections:
        return f"a list of tables: write [[{dotted(path)}]]"
    items: list[Any] = ["a", "b"] if field is not None and "str" in str(field.annotation) else [0, 1]
    return f"a list, like {','.join(map(str, items)) if _is_flag(origin) else in_toml(items)}"


def _choice(options: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))


def _is_flag(origin: str) -> bool:
    return origin.startswith("--")


def _flag(path: Path) -> str:
    return f"--{dotted(path).replace('_', '-')}"
