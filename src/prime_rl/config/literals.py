"""Values that are written as text, on the command line and in environment variables."""

import ast
import json
import re
from typing import Any

from prime_rl.config.schema import Kind
from prime_rl.errors import ConfigError

_BAD = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""What reading a text that is no literal can raise."""


def read_value(kind: Kind, text: str | None, origin: str) -> Any:
    """The value that `text` is for a key of this kind; the schema has the last word on scalars.

    None is a flag without a value: true for a flag, an empty table for a section.
    Raises: ConfigError for a list or table that is neither JSON nor a Python literal.
    """
    if text is None:
        return True if kind in (Kind.FLAG, Kind.FREE) else {}
    _check_characters(text, origin)
    if text == "None":
        return None
    if kind in (Kind.SCALAR, Kind.FLAG):
        return text
    if kind is Kind.FREE:
        return looks_like(text)
    if text.lstrip().startswith(("{", "[")):
        return _literal(text, origin)
    if kind is Kind.LIST:
        return [item.strip() for item in text.split(",") if item.strip()]
    return text  # a string where a table belongs: validation says what belongs there


def looks_like(text: str) -> Any:
    """A number, truth value, list or table where the text is one in JSON or Python; else the text itself."""
    try:
        return _literal(text, "")
    except ConfigError:
        return text


def _literal(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except _BAD as error:
        reason = str(error)
    try:
        return _plain(ast.literal_eval(text.strip()))
    except _BAD:
        raise ConfigError(f"{origin}: {text!r} is neither JSON ({reason}) nor a Python literal") from None


def _plain(value: Any) -> Any:
    """The value in the types that TOML and JSON have, so that it can be written down again."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value!r} has no counterpart in TOML")


def _check_characters(text: str, origin: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{origin}: {text!r} is not valid UTF-8") from None


def whole_number(value: Any) -> int | None:
    """A whole number of up to nine digits, which may be written as text; None for anything else."""
    text = "" if isinstance(value, bool) else str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
