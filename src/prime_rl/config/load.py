"""From a command line to a validated configuration.

defaults < PRIME_ variables < TOML files, left to right < flags

sources: merge -> sharing: fill shared values -> root.prepare: fill what follows -> variants: leave out keys of types
that were not chosen -> validation
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from prime_rl import lifeline
from prime_rl.config.reading.sharing import share, share_sections
from prime_rl.config.reading.sources import Values, env_settings, merge, parse_argv
from prime_rl.config.reading.validation import validate
from prime_rl.config.reading.variants import leave_out_keys_of_other_types

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Config]):
    """A configuration and how it came about."""

    config: Config
    values: Values
    """The merged sources, with the place that each value was written at."""

    @property
    def notices(self) -> list[str]:
        """What the user should know although nothing is wrong."""
        return self.values.notices


def resolve(root: type[Config], argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Resolved[Config]:
    """The configuration that `argv` and the environment describe.

    Before validation, the root's class attributes `shared_sections` and `shared` (root key -> component keys) have
    their values filled in, and its class method `prepare` fills what is derived.
    Raises ConfigError, with one line per complaint.
    """
    command = parse_argv(root, argv)
    variables = list(env_settings(root, _variables() if environment is None else environment))
    values = merge(root, variables, command.files, command.flags)
    share_sections(values, root)
    share(values, root)
    if prepare := getattr(root, "prepare", None):
        prepare(values)
    leave_out_keys_of_other_types(root, values)
    return Resolved(validate(root, values), values)


def load(root: type[Config], argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of `resolve` alone."""
    return resolve(root, argv, environment).config


def _variables() -> Mapping[str, str]:
    """The environment; for a process that was launched none: its launcher has resolved its file already."""
    return {} if lifeline.VARIABLE in os.environ else os.environ
