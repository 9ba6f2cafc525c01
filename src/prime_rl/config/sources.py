"""Where values come from: TOML files, environment variables and the command line, merged into one mapping.

Each source yields `Setting`s, a path with a value and the place it was written at; `merge` lays them over each other in
order of precedence. Nothing is validated here beyond what is needed to read a value: that is `config.load`.
"""

import ast
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel

from prime_rl.config.schema import Kind, Path, all_keys, find, keys_at
from prime_rl.errors import ConfigError

ENV_PREFIX = "PRIME_"
INHERIT = "toml_files"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was written."""

    path: Path
    value: Any
    origin: str


@dataclass(slots=True)
class Values:
    """A nested mapping of plain values, and the place each was written at."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def origin(self, path: Path) -> str:
        """Where `path`, or the nearest table around it, was written."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
            if end == len(path):
                inside = [origin for key, origin in self.origins.items() if key[:end] == path]
                if inside:
                    return inside[0]
        return "default"

    def get(self, path: Path, default: Any = None) -> Any:
        """The value at `path`; `default` where there is none, or a null."""
        node: Any = self.tree
        for part in path:
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return default if node is None or node == "None" else node

    def put(self, setting: Setting) -> None:
        """Lay one setting over what is there: tables merge, everything else is replaced."""
        node: Any = self.tree
        for part, following in zip(setting.path, setting.path[1:], strict=False):
            node = _child(node, part, is_list=isinstance(following, int))
        last = setting.path[-1]
        if isinstance(node, list):
            last = _index(node, last)
        self.origins[setting.path] = setting.origin
        if setting.value != {} or not isinstance(_get(node, last), dict):
            node[last] = setting.value


def _get(node: Any, key: Any) -> Any:
    return node.get(key) if isinstance(node, dict) else node[key]


def _index(node: list[Any], part: str | int) -> int:
    index = int(part)
    if index > len(node):
        raise ConfigError(f"there is no entry {index}: the list has {len(node)}, and a new one would be {len(node)}")
    if index == len(node):
        node.append({})
    return index


def _child(node: Any, part: str | int, *, is_list: bool) -> Any:
    key = _index(node, part) if isinstance(node, list) else part
    if not isinstance(_get(node, key), dict | list):
        node[key] = [] if is_list else {}
    return node[key]


# TOML


def toml_settings(path: FilePath, prefix: Path = (), seen: tuple[FilePath, ...] = ()) -> Iterator[Setting]:
    """The settings of a file, after those of the files it inherits from with `toml_files = [...]`."""
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(f"{path}: {INHERIT} leads back to this file; break the circle")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; paths are relative to {FilePath.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    parents = table.pop(INHERIT, [])
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f'{path}: {INHERIT} must be a list of file names, like {INHERIT} = ["base.toml"]')
    for parent in parents:
        yield from toml_settings(path.parent / parent, prefix, (*seen, resolved))
    lines = toml_lines(text)
    yield from _walk(table, prefix, len(prefix), path, lines)


def _walk(
    table: Mapping[str, Any], at: Path, skip: int, file: FilePath, lines: Mapping[Path, int]
) -> Iterator[Setting]:
    if len(at) > 0:
        yield Setting(at, {}, _place(file, at[skip:], lines))
    for key, value in table.items():
        here = (*at, key.replace("-", "_"))
        if isinstance(value, dict):
            yield from _walk(value, here, skip, file, lines)
            continue
        yield Setting(here, value, _place(file, here[skip:], lines))
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):  # same values again: only for the places of the keys inside
                yield from _walk(item, (*here, index), skip, file, lines)


def _place(file: FilePath, path: Path, lines: Mapping[Path, int]) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f"{file}:{lines[path[:end]]}"
    return str(file)


_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+)\s*=")


def toml_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of each table header and key. A guide for messages: exotic quoting may be missed."""
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                lines.setdefault(table, number)
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
            lines.setdefault(path, number)
    return lines


def _parts(dotted: str) -> Path:
    return tuple(part.strip().strip("\"'").replace("-", "_") for part in dotted.split("."))


# environment


def env_settings(root: type[BaseModel], environment: Mapping[str, str]) -> Iterator[Setting]:
    """`PRIME_MODEL__NAME=x` sets model.name. Variables that resemble no key belong to somebody else."""
    known = keys_at(root, ())
    for variable in sorted(environment):
        if not variable.startswith(ENV_PREFIX):
            continue
        path: Path = tuple(variable[len(ENV_PREFIX) :].lower().split("__"))
        is_ours = path[0] in known if len(path) == 1 else nearest_key(root, path) is not None
        if is_ours and path != ("api_key",):  # PRIME_API_KEY is the key of the `prime` command
            value = read_value(root, path, environment[variable], variable)
            yield Setting(path, value, f"variable {variable}")


# command line


@dataclass(slots=True)
class Command:
    """A parsed command line: TOML settings first, then flags, whatever order they were written in."""

    files: list[Setting] = field(default_factory=list)
    flags: list[Setting] = field(default_factory=list)


def parse_argv(root: type[BaseModel], argv: Sequence[str]) -> Command:
    """`@ file`, `@file`, `--section @ file`, `--a.b-c value`, `--a.b_c=value`, `--flag`, `--no-flag`."""
    command = Command()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("@"):
            command.files += toml_settings(_file_of(word, words))
        elif word.startswith("--") and len(word) > 2:
            _parse_flag(root, word[2:], words, command)
        else:
            raise ConfigError(f"{word!r}: expected --key value or @ file.toml; see --help")
    return command


def _file_of(word: str, words: list[str]) -> FilePath:
    name = word[1:] or (words.pop(0) if words else "")
    if not name or name.startswith("--"):
        raise ConfigError("@ must be followed by a TOML file, like: @ examples/reverse_text_cpu/rl.toml")
    return FilePath(name)


def _parse_flag(root: type[BaseModel], word: str, words: list[str], command: Command) -> None:
    key, equals, inline = word.partition("=")
    path: Path = tuple(key.replace("-", "_").split("."))
    origin = f"--{key}"
    if words and words[0].startswith("@") and not equals:
        command.files += toml_settings(_file_of(words.pop(0), words), path)
        return
    target = find(root, path)
    negated = _negated(root, path) if target is None else None
    if negated is not None:
        is_flag = find(root, negated).kind is Kind.FLAG  # type: ignore[union-attr]  # _negated looked it up
        command.flags.append(Setting(negated, False if is_flag else None, origin))
        return
    if target is None:
        raise ConfigError(unknown_key(root, path, origin))
    if equals:
        command.flags.append(Setting(_indexed(root, path), read_value(root, path, inline, origin), origin))
        return
    values = _take_values(target.kind, words)
    if not values and target.kind not in (Kind.FLAG, Kind.SECTION):
        raise ConfigError(f"{origin}: needs a value, like {origin} ...; see --help")
    text = ",".join(values) if len(values) > 1 else (values[0] if values else None)
    value = read_value(root, path, text, origin)
    command.flags.append(Setting(_indexed(root, path), value, origin))


def _negated(root: type[BaseModel], path: Path) -> Path | None:
    """The path that `--no-a.b` or `--a.no-b` switches off, if there is one."""
    for index in (0, len(path) - 1):
        part = str(path[index])
        if part.startswith("no_"):
            candidate = (*path[:index], part[3:], *path[index + 1 :])
            if find(root, candidate) is not None:
                return candidate
    return None


def _indexed(root: type[BaseModel], path: Path) -> Path:
    """`env.id` means `env.0.id`: a list of tables is addressed by index, the first one by default."""
    full: Path = ()
    for part in path:
        target = find(root, full) if full else None
        if target and target.kind is Kind.LIST and target.sections and not str(part).isdigit():
            full = (*full, 0)
        full = (*full, int(part) if str(part).isdigit() else part)
    return full


def _take_values(kind: Kind, words: list[str]) -> list[str]:
    """The words that belong to the flag just read: one, or for a list all up to the next flag."""
    taken: list[str] = []
    while words and _is_value(words[0]):
        if kind is Kind.FLAG and words[0].lower() not in ("true", "false"):
            break
        taken.append(words.pop(0))
        if kind is not Kind.LIST:
            break
    return taken


def _is_value(word: str) -> bool:
    return not word.startswith(("--", "@")) or word == "--"


def read_value(root: type[BaseModel], path: Path, text: str | None, origin: str) -> Any:
    """A value written as text, read by what its key expects; the schema has the last word on scalars."""
    target = find(root, path)
    if text is None:
        return True if target and target.kind is Kind.FLAG else {}
    if text == "None":
        return None
    if target is None or target.kind in (Kind.SCALAR, Kind.FLAG):
        return text
    if target.kind is Kind.FREE:
        return _looks_like(text)
    if text.lstrip().startswith(("{", "[")):
        return _literal(text, origin)
    if target.kind is Kind.LIST:
        return [item.strip() for item in text.split(",") if item.strip()]
    if target.kind is Kind.MAPPING:
        raise ConfigError(f"{origin}: {text!r} is no table; write it as JSON, like {origin} '{{\"a\": 1}}'")
    return text  # a string where a table belongs: validation says what the table's keys are


def _looks_like(text: str) -> Any:
    """A number, truth value, list or table where the text is one in JSON or Python; else the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _literal(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ConfigError(f"{origin}: {text!r} is neither JSON ({error}) nor a Python literal") from None


def unknown_key(root: type[BaseModel], path: Path, origin: str) -> str:
    """The message for a key that does not exist, with the nearest one that does."""
    from_here = [part for part in path if not isinstance(part, int)]
    dotted = ".".join(str(part) for part in from_here)
    near = nearest_key(root, path)
    hint = f"; did you mean {near}?" if near else "; see --help for the keys there are"
    return f"{dotted}: no such key ({origin}){hint}"


def nearest_key(root: type[BaseModel], path: Path) -> str | None:
    """The existing dotted key nearest to `path`: at the same place first, then anywhere."""
    names = [str(part) for part in path if not isinstance(part, int)]
    for end in range(len(names) - 1, -1, -1):
        siblings = keys_at(root, tuple(names[:end]))
        close = difflib.get_close_matches(names[end], siblings, n=1, cutoff=0.6)
        if close and find(root, tuple(names[:end])) is not None and names[end] not in siblings:
            candidate = (*names[:end], close[0], *names[end + 1 :])
            if find(root, candidate) is not None or end == len(names) - 1:
                return ".".join(candidate)
    everywhere = sorted(set(all_keys(root)), key=len)
    same_leaf = [key for key in everywhere if key.rpartition(".")[2] == names[-1]]
    if same_leaf:
        return same_leaf[0]
    close = difflib.get_close_matches(".".join(names), everywhere, n=1, cutoff=0.7)
    return close[0] if close else None


def merge(root: type[BaseModel], *layers: Sequence[Setting]) -> Values:
    """Lay settings over each other; later layers and later settings win."""
    values = Values()
    for layer in layers:
        for setting in layer:
            values.put(setting)
    return values
