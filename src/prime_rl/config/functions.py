"""Functions of the user's, found by their import path."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from prime_rl.errors import ConfigError


def load_function(import_path: str, *, key: str, takes: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function at `import_path`, which is to be called with one argument (named `takes` in messages) and `kwargs`.

    A module may lie in the directory that the run was started in. `key`: where the path and kwargs stand, like `loss`.
    Raises: ConfigError for a path that leads to no function, or a function that cannot be called so.
    """
    function = _imported(import_path, f"{key}.import_path = {import_path!r}")
    try:
        inspect.signature(function).bind(None, **kwargs)
    except (TypeError, ValueError) as error:
        given = ", ".join([takes, *kwargs])
        raise ConfigError(f"{key}.kwargs: {import_path} cannot be called with ({given}): {error}") from error
    return function


def reason(error: Exception) -> str:
    """The error in one line, with the innermost place of the user's code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _imported(import_path: str, where: str) -> Callable[..., Any]:
    """Raises: ConfigError naming the path and what is not there."""
    module_name, _, name = import_path.replace(":", ".").rpartition(".")
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"{where} is no path to a function; write it as package.module.function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module in the directory that the run was started in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"{where}: there is no module {missing!r}, neither installed nor in {os.getcwd()}"
            ) from error
        raise ConfigError(f"{where}: module {module_name!r} needs {missing!r}, which is not installed") from error
    except Exception as error:
        raise ConfigError(f"{where}: module {module_name!r} cannot be imported: {reason(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        has = f"it has {', '.join(functions)}" if functions else "it has no functions"
        raise ConfigError(f"{where}: module {module_name!r} has no function {name!r}; {has}")
    return function  # type: ignore[no-any-return]
