"""Chance in a deterministic run: what an environment's code draws follows from its rollout, whatever runs beside it.

Code of environments draws from the generators of `random` and `numpy.random`, of which a process has one each, while
its rollouts take turns in one event loop. So the generators change hands with the turns: each rollout finds them as it
left them, and began with a seed of its own.

    task of rollout 1   task of rollout 2
    seed 1, draws a
                        seed 2, draws x
    draws b                                   as if rollout 2 were not there
                        draws y

Not governed: what threads and processes of an environment draw, generators that it makes from the clock or the system,
and the order in which several tasks of one rollout draw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class _Generators:
    """Their state, while they are in other hands."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]).get_state()

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def take_away(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()


class Chance:
    """The generators of this process. Every task that the current event loop starts from now on has those of its
    rollout, or those that are nobody's."""

    def __init__(self, seed: int) -> None:
        self._nobodys = self._present = _Generators(seed)
        self._nobodys.put_back()
        self._owned: ContextVar[_Generators] = ContextVar("generators", default=self._nobodys)
        asyncio.get_running_loop().set_task_factory(self._start)

    def own(self, seed: int) -> None:
        """The current task, and those that it starts from now on, draw from generators of their own."""
        self._owned.set(_Generators(seed))
        self.hand_over()

    def hand_over(self) -> None:
        """Give the generators to whom the current task belongs."""
        owner = self._owned.get()
        if owner is not self._present:
            self._present.take_away()
            owner.put_back()
            self._present = owner

    def _start(self, loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Turns(work, self), loop=loop, **how)


class _Turns(Coroutine[Any, Any, T]):
    """A coroutine that finds its generators at the beginning of every turn."""

    def __init__(self, work: Coroutine[Any, Any, T], chance: Chance) -> None:
        self._work = work
        self._chance = chance

    def send(self, value: Any) -> Any:
        self._chance.hand_over()
        return self._work.send(value)

    def throw(self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None, /) -> Any:
        self._chance.hand_over()
        return self._work.throw(kind) if value is None else self._work.throw(kind, value, traceback)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._work.__await__()
