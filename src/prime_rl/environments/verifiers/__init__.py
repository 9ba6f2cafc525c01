"""The door to verifiers: the only package of ours that imports it. Lives in environment workers.

verifiers 0.3.1 carries two APIs in one install, and a half takes seconds to import; so each form has a module of its
own, and a worker imports the one that its environment is written in. Both give the same `Environment`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

from prime_rl.environments.rollouts import Environment, EnvironmentSpec
from prime_rl.errors import EnvironmentSetupError
from prime_rl.imports import importing


async def load(spec: EnvironmentSpec) -> Environment:
    """Load the environment that `spec` names.

    Raises: EnvironmentSetupError saying what is missing or what its loader raised.
    """
    with importing():
        module = _import(spec)
        api = spec.api
        if api == "auto":
            api = "classic" if hasattr(module, "load_environment") else "v1"
        form = importlib.import_module(f"{__name__}.{api}")
    _let_speak(spec.library_log_level)
    environment: Environment = await form.load(spec)
    if environment.num_train == 0 and environment.num_eval == 0:
        await environment.close()
        raise EnvironmentSetupError(f"environment {spec.id!r} has no examples")
    return environment


def _let_speak(level: str) -> None:
    """Have verifiers write to our log, from `level` up; its classic form silences or formats itself when imported."""
    library = logging.getLogger("verifiers")
    library.handlers.clear()
    library.propagate = True
    library.setLevel(level.upper())


def _import(spec: EnvironmentSpec) -> ModuleType:
    """The module of the environment: `my-env`, `owner/my-env` and `owner/my-env@0.2.1` are the module `my_env`; where
    verifiers ships a taskset of that name it is meant, as it is there."""
    package, _, version = spec.id.rsplit("/", 1)[-1].partition("@")
    module = package.replace("-", "_")
    if _is_shipped(module) and spec.api != "classic":
        module = f"verifiers.v1.tasksets.{module}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise EnvironmentSetupError(
                f"environment {spec.id!r} is not installed: there is no module {module!r}. {_how_to_install(spec.id)}, "
                "or correct the id"
            ) from error
        raise EnvironmentSetupError(f"environment {spec.id!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:  # the environment's code, at import: whatever it raises is told to the user
        raise EnvironmentSetupError(f"environment {spec.id!r} cannot be imported: {error!r}") from error
    if version not in ("", "latest"):
        _check_version(spec.id, package, version)
    return found


def _is_shipped(module: str) -> bool:
    """Whether verifiers has a v1 taskset of this name. Told from its files: to import it takes seconds."""
    verifiers = importlib.util.find_spec("verifiers")
    places = (verifiers.submodule_search_locations if verifiers is not None else None) or ()
    return any(Path(place, "v1", "tasksets", module, "__init__.py").exists() for place in places)


def _how_to_install(env_id: str) -> str:
    package = env_id.rsplit("/", 1)[-1].partition("@")[0]
    directory = Path("environments", package.replace("-", "_"))
    if (directory / "pyproject.toml").exists():
        return f"Install it: pip install -e ./{directory}"
    if "/" in env_id:
        return f"Install it from the hub: prime env install {env_id} (pip install 'prime-rl[hub]' brings prime)"
    return (
        f"Install its package into this Python: pip install -e <its directory>, or prime env install <owner>/{package}"
    )


def _check_version(env_id: str, package: str, version: str) -> None:
    """Raises: EnvironmentSetupError when another version of the package is installed than the id names."""
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a module that came by another way
        installed = None
    if installed != version:
        raise EnvironmentSetupError(
            f"environment {env_id!r}: installed is {package} {installed or 'of no version'}, not {version}. "
            f"{_how_to_install(env_id)}, or correct the id"
        )
