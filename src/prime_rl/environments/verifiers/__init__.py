"""The door to verifiers: the only package of ours that imports it. Lives in environment workers.

verifiers 0.3.1 carries two APIs in one install, and a half takes seconds to import; so each form has a module of its
own, and a worker imports the one that its environment is written in. Both give the same `Environment`.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from prime_rl.environments.rollouts import Environment, EnvironmentSpec
from prime_rl.errors import EnvironmentSetupError


async def load(spec: EnvironmentSpec) -> Environment:
    """Load the environment that `spec` names.

    Raises: EnvironmentSetupError saying what is missing or what its loader raised.
    """
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
    name = spec.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise EnvironmentSetupError(
                f"environment {spec.id!r} is not installed: there is no module {name!r}. Install its package into this "
                "Python, or correct the id"
            ) from error
        raise EnvironmentSetupError(f"environment {spec.id!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:  # the environment's code, at import: whatever it raises is told to the user
        raise EnvironmentSetupError(f"environment {spec.id!r} cannot be imported: {error!r}") from error
