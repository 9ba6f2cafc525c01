"""Which configuration keys a process really reads, so that a test can find the ones without effect.

Off unless the environment variable PRIME_RL_RECORD_READS names a directory. Then every process appends a line
`<process> <Class>.<field>` to a file of its own there, at the first read of each key after its configuration was
resolved. A file that is appended to survives a process that is killed.
"""

import os
from pathlib import Path
from typing import Any

from prime_rl.config.shared import BaseConfig

VARIABLE = "PRIME_RL_RECORD_READS"


def start_recording(process: str) -> None:
    """Record from now on, where the environment asks for it."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    file = (Path(directory) / f"{process}-{os.getpid()}.txt").open("a", buffering=1, encoding="utf-8")
    seen: set[tuple[type, str]] = set()

    def getattribute(self: BaseConfig, name: str) -> Any:
        cls = type(self)
        if (cls, name) not in seen:
            seen.add((cls, name))
            if name in cls.model_fields:
                file.write(f"{process} {cls.__name__}.{name}\n")
        return object.__getattribute__(self, name)

    BaseConfig.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]  # a test asked for it


def recorded(directory: Path) -> dict[str, set[str]]:
    """Process -> the keys, as `Class.field`, that any process of that name has read."""
    keys: dict[str, set[str]] = {}
    for file in directory.glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            process, _, key = line.partition(" ")
            keys.setdefault(process, set()).add(key)
    return keys
