"""The command line: files and flags, whatever order they stand in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from pydantic import BaseModel

from prime_rl.config.compat import translation, vllm_flags
from prime_rl.config.compat.table import READ_FIRST
from prime_rl.config.literals import read_value
from prime_rl.config.reading.nearest import is_misspelt, unknown_key
from prime_rl.config.reading.spelling import canonical
from prime_rl.config.reading.toml import toml_settings
from prime_rl.config.schema import Kind, Path
from prime_rl.config.values import Setting
from prime_rl.errors import ConfigError


@dataclass(slots=True)
class Command:
    """A parsed command line."""

    files: list[Setting] = field(default_factory=list)
    flags: list[Setting] = field(default_factory=list)


def parse_argv(root: type[BaseModel], argv: Sequence[str]) -> Command:
    """`@ file`, `@file`, `--section @ file`, `--a.b-c value`, `--a.b_c=value`, `--flag`, `--no-flag`.

    Raises: ConfigError naming the word that cannot be read.
    """
    command = Command()
    words, before = list(argv), ""
    while words:
        word = words.pop(0)
        if word.startswith("@"):
            file = _file_of(word, words, before)
            command.files += toml_settings(file)
            word = f"@ {file}"
        elif word.startswith("--") and len(word) > 2:
            _parse_flag(root, word[2:], words, command)
        else:
            after = f" after {before}" if before else ""
            raise ConfigError(f"{word!r}{after}: expected --key value or @ file.toml; see --help")
        before = word
    command.flags.sort(key=lambda setting: setting.path[-1] not in READ_FIRST)
    return command


def _file_of(word: str, words: list[str], before: str) -> FilePath:
    name = word[1:] or (words.pop(0) if words else "")
    if not name or name.startswith("--"):
        after = f" after {before}" if before else ""
        raise ConfigError(f"'@'{after}: must be followed by a TOML file, like: @ examples/reverse_text_cpu/rl.toml")
    return FilePath(name)


def _parse_flag(root: type[BaseModel], word: str, words: list[str], command: Command) -> None:
    key, equals, inline = word.partition("=")
    path, origin = canonical(root, tuple(key.split("."))), f"--{key}"
    kind = translation.kind_at(root, path)
    if kind is None:
        command.flags.append(
            _negation(root, path, origin) or _for_vllm(root, path, origin, inline if equals else None, words)
        )
    elif equals:
        command.flags.append(Setting(path, read_value(kind, inline, origin), origin))
    elif words and words[0].startswith("@") and kind in (Kind.SECTION, Kind.LIST, Kind.MAPPING):
        command.files += _section_settings(root, path, _file_of(words.pop(0), words, origin), origin)
    else:
        values = _take_values(kind, words)
        if not values and kind not in (Kind.FLAG, Kind.SECTION):
            at_sign = (
                f"; a value that starts with @ is written {origin}=@..." if words[:1] and words[0][0] == "@" else ""
            )
            raise ConfigError(f"{origin}: needs a value, like {origin} ...; see --help{at_sign}")
        text = ",".join(values) if values else None
        command.flags.append(Setting(path, read_value(kind, text, origin), origin))


def _section_settings(root: type[BaseModel], path: Path, file: FilePath, origin: str) -> list[Setting]:
    """The settings of `--section @ file`. Raises: ConfigError where the file is plainly one for the whole command."""
    settings = list(toml_settings(file, path))
    keys = {setting.path[len(path)] for setting in settings if len(setting.path) > len(path)}
    fitting = [key for key in keys if translation.kind_at(root, canonical(root, (*path, key)))]
    if keys and not fitting and all(translation.kind_at(root, canonical(root, (key,))) for key in keys):
        raise ConfigError(
            f"{origin} @ {file} reads the file into that section, but its keys are those of the whole command; write: "
            f"@ {file} {origin}"
        )
    return settings


def _negation(root: type[BaseModel], path: Path, origin: str) -> Setting | None:
    """`--no-a.b` or `--a.no-b`: the flag is false, anything else is none."""
    for index in (0, len(path) - 1):
        part = str(path[index])
        if part.startswith("no_"):
            positive = canonical(root, (*path[:index], part[3:], *path[index + 1 :]))
            if kind := translation.kind_at(root, positive):
                return Setting(positive, False if kind in (Kind.FLAG, Kind.FREE) else None, origin)
    return None


def _for_vllm(root: type[BaseModel], path: Path, origin: str, inline: str | None, words: list[str]) -> Setting:
    """A flag of `inference` that nobody here knows: a newer or older vLLM may.

    Raises: ConfigError where it is no such flag, or a misspelling of one that is known.
    """
    name = str(path[0])
    positive = name.removeprefix("no_")
    if root.__name__ != "InferenceConfig" or len(path) > 1 or is_misspelt(root, (positive,)):
        raise ConfigError(unknown_key(root, path, origin))
    notice = f"{origin} is handed on to vLLM: it is no key here, and no flag of vLLM {vllm_flags.VERSION}"
    if inline is None:
        inline = next(iter(_take_values(Kind.FREE, words)), None)
    value = False if inline is None and name != positive else read_value(Kind.FREE, inline, origin)
    return Setting(("vllm", positive if value is False else name), value, origin, notice)


def _take_values(kind: Kind, words: list[str]) -> list[str]:
    """The words that belong to the flag just read: one, or for a list all up to the next flag."""
    taken: list[str] = []
    while words and not words[0].startswith(("--", "@")):
        if kind is Kind.FLAG and words[0].lower() not in ("true", "false", "none"):
            break
        taken.append(words.pop(0))
        if kind is not Kind.LIST:
            break
    return taken
