"""What commands.toml lists, and how a promise is held against a written file."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIST = tomllib.loads((Path(__file__).parent / "commands.toml").read_text())


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Where something stands in a document, and what the resolved configurations must hold."""

    at: str
    text: str
    promises: list[str] = field(default_factory=list)
    promised: dict[str, Any] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)

    def broken(self, written: dict[str, dict[str, Any]]) -> list[str]:
        """Where the written files differ from what is promised of them."""
        shared = [LIST["promise"][name] for name in self.promises]
        trees = [{name: tree[name] for name in tree.keys() & written.keys()} for tree in shared] + [self.promised]
        return [miss for tree in trees for name in tree for miss in misses(tree[name], written.get(name), name)]


@dataclass(frozen=True, kw_only=True)
class Command(Promise):
    """A command of ours."""

    writes: list[str]
    in_prose: bool = False
    output_dir: str = "outputs"
    together: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def document(self) -> str:
        return self.at.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class Fragment(Promise):
    """A piece of a configuration file, and the command that is given it."""

    command: str


def misses(promised: Any, written: Any, path: str) -> Iterator[str]:
    """Where `written` differs from the part of it that is promised; lists have the same length."""
    if isinstance(promised, dict) and isinstance(written, dict):
        for key, value in promised.items():
            yield from misses(value, written.get(key), f"{path}.{key}")
    elif isinstance(promised, list) and isinstance(written, list) and len(promised) == len(written):
        for position, (one, other) in enumerate(zip(promised, written, strict=True)):
            yield from misses(one, other, f"{path}[{position}]")
    elif promised != written:
        yield f"{path}: {promised!r} was promised, {written!r} is written"


COMMANDS = {entry["at"]: Command(**entry) for entry in LIST["command"]}
FRAGMENTS = {entry["at"]: Fragment(**entry) for entry in LIST["fragment"]}

OTHERS = [text for group in LIST["other"].values() for text in group["commands"]]
"""Commands that are not ours: `<document>-L<line> <text>`."""
