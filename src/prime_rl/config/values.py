"""What the sources of a configuration become: settings with their places, and the one mapping they are laid into."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prime_rl.config.schema import Path
from prime_rl.errors import ConfigError

MAX_DEPTH = 32
"""Most parts of a path: far more than any configuration needs, far less than Python's recursion limit."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was written: `file.toml:3`, `--flag` or `variable PRIME_X`."""

    path: Path
    value: Any
    origin: str
    notice: str = ""
    """What the user should know of it."""

    @property
    def is_flag(self) -> bool:
        """Whether it stood on the command line."""
        return self.origin.startswith("--")


@dataclass(slots=True)
class Values:
    """A nested mapping of plain values, the place each was written at, and what the user should know about them."""

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
            is_there = part in node if isinstance(node, dict) else isinstance(node, list) and part in range(len(node))
            if not is_there:
                return default
            node = node[part]
        return default if node is None or node == "None" else node

    def put(self, setting: Setting) -> None:
        """Lay one setting over what is there: tables merge, everything else is replaced.

        Raises: ConfigError for a path that skips entries of a list, or is absurdly long.
        """
        path, value = setting.path, setting.value
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{setting.origin}: nested more than {MAX_DEPTH} deep")
        node: Any = self.tree
        for part, following in pairwise(path):
            node = _table_in(node, part, is_list=isinstance(following, int), origin=setting.origin)
        last = _key_in(node, path[-1], setting.origin)
        before = node.get(last) if isinstance(node, dict) else node[last]
        if value == {} and isinstance(before, dict):
            self.origins.setdefault(path, setting.origin)  # a table that is there already only merges
            return
        if isinstance(before, dict | list):
            self._forget(path)
        node[last] = value
        self.origins[path] = setting.origin

    def _forget(self, path: Path) -> None:
        for inside in [key for key in self.origins if key[: len(path)] == path]:
            del self.origins[inside]


def _key_in(node: Any, part: str | int, origin: str) -> Any:
    """The key of `part` in a table, or its index in a list; one past the end appends an entry."""
    if isinstance(node, dict):
        return part
    index = int(part)
    if index > len(node):
        raise ConfigError(
            f"{origin}: there is no entry {index}: the list has {len(node)}, and a new one would be {len(node)}"
        )
    if index == len(node):
        node.append({})
    return index


def _table_in(node: Any, part: str | int, *, is_list: bool, origin: str) -> Any:
    """The table (or list) at `part`, made anew where something else stands."""
    key = _key_in(node, part, origin)
    child = node.get(key) if isinstance(node, dict) else node[key]
    if not isinstance(child, list if is_list else dict):
        child = node[key] = [] if is_list else {}
    return child
