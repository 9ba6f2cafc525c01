"""A configuration as a TOML file that loads back to itself."""

import json
from contextlib import suppress
from pathlib import Path as FilePath
from typing import Any

import tomli_w
from pydantic import BaseModel

from prime_rl.config.schema import Path
from prime_rl.config.values import split
from prime_rl.disk import refusal
from prime_rl.errors import ConfigError

NOT_WRITTEN = ("clean",)
"""Keys that say what to do with an earlier run: the file of this one must not do it again."""


def to_toml(config: BaseModel) -> str:
    """The configuration as TOML, every key spelled out, so that it loads back to itself whatever the defaults are.

    What the root shares with its components is written once, at the root, so that a flag can still change it.
    """
    tree = {key: value for key, value in config.model_dump(mode="json").items() if key not in NOT_WRITTEN}
    for keys in (getattr(config, "shared", {}), getattr(config, "shared_sections", {})):
        for root_key, component_keys in keys.items():
            for key in component_keys:
                _drop_copy(tree, split(root_key), split(key))
    return tomli_w.dumps(_plain(tree))


def _drop_copy(tree: dict[str, Any], original: Path, copy: Path) -> None:
    around = _at(tree, copy[:-1])
    if isinstance(around, dict) and copy[-1] in around and around[copy[-1]] == _at(tree, original):
        del around[copy[-1]]


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(part)
    return tree


def write_toml(config: BaseModel, path: FilePath) -> None:
    """Write `to_toml(config)` to `path`, atomically, for its owner's eyes only: it may hold a server's key.

    Raises: ConfigError where nothing can be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one process writes it: what it left when killed, the next takes
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path} cannot be written: {refusal(error, path)} (--output-dir)") from None


def in_toml(value: Any) -> str:
    """A value as it stands in a TOML file; None as None, which TOML does not have."""
    match value:
        case bool():
            return str(value).lower()
        case str() | FilePath():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(in_toml, value))}]"
        case dict() | BaseModel():
            items = value.items() if isinstance(value, dict) else iter(value)
            return f"{{{', '.join(f'{key} = {in_toml(item)}' for key, item in items)}}}"
    return str(value)


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return "None" if node is None else node
