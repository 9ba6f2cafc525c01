"""Where values come from: environment variables, TOML files and the command line, merged into one mapping.

Each source yields `Setting`s, a path with a value and the place it was written at; `merge` spells their paths as the
schema does, translates older keys, and lays them over each other in order of precedence. Nothing is validated here
beyond what is needed to read a value: that is `config.load`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel

from prime_rl.config.compat import vllm_flags
from prime_rl.config.compat.translation import kind_at, translate
from prime_rl.config.literals import read_value
from prime_rl.config.reading.argv import parse_argv
from prime_rl.config.reading.nearest import is_misspelt, is_one_edit_from_a_key, unknown_key
from prime_rl.config.reading.spelling import canonical
from prime_rl.config.reading.toml import toml_settings
from prime_rl.config.schema import Kind, Path, find
from prime_rl.config.values import MAX_DEPTH, Setting, Values
from prime_rl.errors import ConfigError

__all__ = ["Setting", "Values", "env_settings", "merge", "parse_argv", "toml_settings", "unknown_key"]

ENV_PREFIX = "PRIME_"

_OF_THE_PRIME_COMMAND = {
    *("PRIME_API_BASE_URL", "PRIME_API_KEY", "PRIME_BASE_URL", "PRIME_CONTEXT", "PRIME_DISABLE_VERSION_CHECK"),
    *("PRIME_EVAL_VIEW_MESSAGE", "PRIME_FRONTEND_URL", "PRIME_INFERENCE_HOST", "PRIME_INFERENCE_URL"),
    *("PRIME_PLUGIN_API_VERSION", "PRIME_SANDBOX_REGISTRY", "PRIME_SSH_KEY_PATH", "PRIME_TEAM_ID", "PRIME_USER_ID"),
}
"""Variables of the `prime` command and its libraries: whatever keys there are, these are never ours."""


def env_settings(root: type[BaseModel], environment: Mapping[str, str]) -> Iterator[Setting]:
    """`PRIME_MODEL__NAME=x` sets model.name. A variable that neither is a key nor is nearly one is somebody else's.

    Raises: ConfigError for one that is a key misspelt.
    """
    for variable in sorted(environment):
        names = variable.removeprefix(ENV_PREFIX).lower().split("__")
        if not variable.startswith(ENV_PREFIX) or not all(names) or variable in _OF_THE_PRIME_COMMAND:
            continue
        path, origin = canonical(root, tuple(names)), f"variable {variable}"
        if len(path) == 1 and _is_vllms_own(root, names[0]):
            continue
        if (kind := kind_at(root, path)) is not None:
            yield Setting(path, read_value(kind, environment[variable], origin), origin)
        elif _is_misspelt_variable(root, path):
            raise ConfigError(unknown_key(root, path, origin))


def _is_vllms_own(root: type[BaseModel], name: str) -> bool:
    """Short names like HOST and PORT are too common to claim."""
    return name in vllm_flags.ALL and name not in root.model_fields


def _is_misspelt_variable(root: type[BaseModel], path: Path) -> bool:
    """Names of one word are common, so only those that are all but a key count; `A__B` is written for us or nobody."""
    if len(path) == 1:
        return is_one_edit_from_a_key(root, path)
    return kind_at(root, path[:1]) is not None or is_misspelt(root, path)


def merge(root: type[BaseModel], *layers: Sequence[Setting]) -> Values:
    """Lay settings over each other, under today's names; later layers and later settings win.

    Raises: ConfigError for an older key whose value has no counterpart, and for a path that skips entries of a list.
    """
    values = Values()
    said: set[str] = set()
    for values.layer, layer in enumerate(layers):
        for written in layer:
            for setting in _flat(written):
                spelt = replace(setting, path=canonical(root, setting.path))
                settings, notices = translate(root, spelt, values)
                for current in settings:
                    values.put(_entry_of_list(root, replace(current, path=canonical(root, current.path))))
                for place, text in [*notices, *([("", setting.notice)] if setting.notice else [])]:
                    if text not in said:
                        values.notices.append(f"{place}: {text}" if place else text)
                    said.add(text)
    return values


def _flat(setting: Setting, depth: int = 0) -> Iterator[Setting]:
    """A table as an empty one, then its keys; a list of tables as an empty one, then its entries; else the setting."""
    value = setting.value
    if depth > MAX_DEPTH:
        raise ConfigError(f"{setting.origin}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield Setting(setting.path, [], setting.origin)
        inside: Iterator[tuple[str | int, object]] = iter(enumerate(value))
    elif isinstance(value, dict):
        yield Setting(setting.path, {}, setting.origin)
        inside = iter(value.items())
    else:
        _check_depth(setting)
        yield setting
        return
    for key, item in inside:
        yield from _flat(Setting((*setting.path, key), item, setting.origin), depth + 1)


def _check_depth(setting: Setting) -> None:
    layer = [setting.value]
    for _ in range(MAX_DEPTH):
        layer = [item for node in layer for item in _inside(node)]
        if not layer:
            return
    raise ConfigError(f"{setting.origin}: nested more than {MAX_DEPTH} deep")


def _inside(node: object) -> list[object]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _entry_of_list(root: type[BaseModel], setting: Setting) -> Setting:
    """A table where a list of tables belongs is its first entry."""
    target = find(root, setting.path) if setting.value == {} else None
    if target and target.kind is Kind.LIST and target.sections:
        return Setting((*setting.path, 0), {}, setting.origin)
    return setting
