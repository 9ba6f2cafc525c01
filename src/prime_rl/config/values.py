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
    layers: dict[Path, int] = field(default_factory=dict)
    layer: int = 0
    """Strength of the source that is being laid: a higher one wins."""

    def has(self, path: Path) -> bool:
        """Whether anything was written at `path`, a null included."""
        return self._find(path) is not None

    def written(self, path: Path) -> Any:
        """What was written at `path`, which must be there: a null is None or "None"."""
        found = self._find(path)
        assert found is not None
        return found[0]

    def layer_of(self, path: Path) -> int:
        """Strength of the source of `path`, or of the strongest value below it."""
        return max((layer for key, layer in self.layers.items() if key[: len(path)] == path), default=0)

    def fill(self, path: Path, value: Any, source: Path, origin: str = "") -> None:
        """Write what follows from what stands at `source`, with its strength, and its place where no `origin` is given.

        Nothing is written where a scalar stands and a table belongs: validation says so.
        """
        around = [self._find(path[:end]) for end in range(1, len(path))]
        if all(found is None or isinstance(found[0], dict) for found in around):
            self.put(Setting(path, value, origin or self.origin(source)))
            self.layers[path] = self.layer_of(source)

    def remove(self, path: Path) -> None:
        """Take away the key of a table that is there."""
        del self.get(path[:-1])[path[-1]]
        self._forget(path)

    def _find(self, path: Path) -> tuple[Any] | None:
        node: Any = self.tree
        for part in path:
            is_there = part in node if isinstance(node, dict) else isinstance(node, list) and part in range(len(node))
            if not is_there:
                return None
            node = node[part]
        return (node,)

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
        found = self._find(path)
        return default if found is None or found[0] is None or found[0] == "None" else found[0]

    def put(self, setting: Setting) -> None:
        """Lay one setting over what is there: tables merge, everything else is replaced.

        Raises: ConfigError for a path that skips entries of a list, or is absurdly long.
        """
        path, value = setting.path, setting.value
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{setting.origin}: nested more than {MAX_DEPTH} deep")
        node: Any = self.tree
        for end, (part, following) in enumerate(pairwise(path), start=1):
            key = _key_in(node, part, setting.origin)
            child = node.get(key) if isinstance(node, dict) else node[key]
            kind = list if isinstance(following, int) else dict
            if not isinstance(child, kind):  # a table takes the place of a value
                self._forget(path[:end])
                child = node[key] = kind()
            node = child
        last = _key_in(node, path[-1], setting.origin)
        before = node.get(last) if isinstance(node, dict) else node[last]
        if value == {} and isinstance(before, dict):
            self.origins.setdefault(path, setting.origin)  # a table that is there already only merges
            self.layers[path] = self.layer
            return
        if isinstance(before, dict | list):
            self._forget(path)
        node[last] = value
        self.origins[path] = setting.origin
        self.layers[path] = self.layer

    def _forget(self, path: Path) -> None:
        for inside in [key for key in self.origins if key[: len(path)] == path]:
            del self.origins[inside]
            self.layers.pop(inside, None)


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


def dotted(path: Path) -> str:
    """A path as the user writes it."""
    return ".".join(str(part) for part in path)


def split(key: str) -> Path:
    """A dotted key as a path."""
    return tuple(key.split("."))
