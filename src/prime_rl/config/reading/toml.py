"""TOML files: their settings, each with the line it stands on."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from prime_rl.config.compat.table import READ_FIRST
from prime_rl.config.schema import Path
from prime_rl.config.values import Setting
from prime_rl.errors import ConfigError

INHERIT = "toml_files"


def toml_settings(path: FilePath, prefix: Path = (), seen: tuple[FilePath, ...] = ()) -> Iterator[Setting]:
    """The settings of a file, below `prefix`, after those of the files it inherits from with `toml_files = [...]`.

    Raises: ConfigError for a file that is missing, no TOML, or inherits from itself.
    """
    try:
        resolved = path.resolve()
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text)
    except FileNotFoundError:
        relative = f"{seen[-1]} inherits from it" if seen else f"paths are relative to {FilePath.cwd()}"
        raise ConfigError(f"{path}: no such file; {relative}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, ValueError, RuntimeError) as error:  # unreadable, no UTF-8, or nested beyond all measure
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if resolved in seen:
        raise ConfigError(f"{path}: {INHERIT} leads back to this file; break the circle")
    parents = table.pop(INHERIT, [])
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f'{path}: {INHERIT} must be a list of file names, like {INHERIT} = ["base.toml"]')
    for parent in parents:
        yield from toml_settings(path.parent / parent, prefix, (*seen, resolved))
    yield from _File(path, toml_lines(text), prefix).settings(table, ())


@dataclass(frozen=True, slots=True)
class _File:
    path: FilePath
    lines: Mapping[Path, int]
    prefix: Path

    def settings(self, table: Mapping[str, Any], at: Path) -> Iterator[Setting]:
        """Every table, then what is in it; a list of tables is an empty list, then its entries."""
        if self.prefix or at:
            yield self._setting(at, {})
        for key in sorted(table, key=lambda key: key not in READ_FIRST):
            value, here = table[key], (*at, key)
            if isinstance(value, dict):
                yield from self.settings(value, here)
            elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                yield self._setting(here, [])
                for index, item in enumerate(value):
                    yield from self.settings(item, (*here, index))
            else:
                yield self._setting(here, value)

    def _setting(self, at: Path, value: Any) -> Setting:
        for end in range(len(at), 0, -1):
            if at[:end] in self.lines:
                return Setting((*self.prefix, *at), value, f"{self.path}:{self.lines[at[:end]]}")
        return Setting((*self.prefix, *at), value, str(self.path))


_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+)\s*=")


def toml_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of each table header and key. A guide for messages: exotic quoting may be missed."""
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _in_lists(_parts(header[2]), counts, is_new=header[1] == "[[")
            lines.setdefault(table[:-1] if isinstance(table[-1], int) else table, number)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_parts(key[1])), number)
    return lines


def _in_lists(parts: Path, counts: dict[Path, int], *, is_new: bool) -> Path:
    """The path of a header, with the index of the latest entry after each list of tables on the way."""
    path: Path = ()
    for end, part in enumerate(parts, start=1):
        path = (*path, part)
        if is_new and end == len(parts):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _parts(dotted: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
