"""Which rollouts are struck by a fault, and where; and the log of it. Shared by all who inject some."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Fault:
    """What shall happen to one rollout."""

    kind: str
    """ "" for nothing."""
    turn: int = 0
    """Before, or in, which turn."""


class Stream:
    """One fault, or none, for every rollout that asks: the first ones as a script says, then by chance."""

    def __init__(
        self, seed: str, *, rates: Mapping[str, float], script: Sequence[str] = (), num_turns: int = 1
    ) -> None:
        """`rates`: probability by kind of fault, together at most 1. It strikes in any of `num_turns` turns."""
        self._random = random.Random(seed)
        self.random = random.Random(f"{seed}/when it strikes")
        """For what is decided as faults strike, at times that no seed tells: what is drawn must not depend on it."""
        self._rates = dict(rates)
        self._script = list(script)
        self._num_turns = num_turns

    def next(self) -> Fault:
        """The fault of the next rollout."""
        turn = self._random.randrange(self._num_turns)
        if self._script:
            return Fault(kind=self._script.pop(0), turn=turn)
        draw = self._random.random()
        for kind, rate in self._rates.items():
            if draw < rate:
                return Fault(kind=kind, turn=turn)
            draw -= rate
        return Fault(kind="")


class FaultLog:
    """One JSON object a line. A line is in the file when `note` returns: the next thing may be a SIGKILL."""

    def __init__(self, file: Path) -> None:
        """Raises: FileExistsError when somebody has it."""
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)

    def note(self, **fields: Any) -> None:
        os.write(self._descriptor, json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
