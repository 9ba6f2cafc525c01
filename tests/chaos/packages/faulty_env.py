"""An environment of verifiers' classic API around another one, in which things go wrong.

exception  its code raises: an error of its own, TimeoutError, or one of verifiers' errors
await      its code waits for something that never comes
block      its code computes for ever, and holds the event loop
kill       its process kills itself with SIGKILL
nan        the reward is NaN

`block` and `kill` harm all rollouts of their process. So that their rates, too, are the share of rollouts that come to
harm, a rollout that is drawn for one does it with the probability 1 / n, n being the rollouts in the process.

Which rollout of the orchestrator it is, is told by `sampling.seed = 0`: its seed then is its number. The seed goes no
further: the turns of a rollout must not be sampled with the same random numbers.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import verifiers.legacy as vf
from tests.chaos.draws import Fault, FaultLog, Stream

NEVER_S = 3600.0
SETTLE_S = 0.1
"""After that, all rollouts that were given to the process at the same time have begun, and are counted."""
SHARED = ("block", "kill")
"""What harms all rollouts of a process."""


class InjectedError(Exception):
    """An error of the environment's own."""


class _Injector:
    """The faults of one process."""

    def __init__(self, directory: Path, seed: int, rates: Mapping[str, float], script: Sequence[str], num_turns: int):
        for number in count():
            try:
                self._log = FaultLog(directory / f"worker-{number}.jsonl")
                break
            except FileExistsError:
                continue
        # Only the first process has the script, and no two draw the same.
        first = script if number == 0 else ()
        self._stream = Stream(f"{seed}/{number}", rates=rates, script=first, num_turns=num_turns)
        self._is_scripted = bool(first)
        self._errors = cycle([InjectedError, TimeoutError, vf.ToolError])
        self._held: set[str] = set()

    def begin(self, state: vf.State) -> None:
        state["sampling_args"] = dict(state["sampling_args"])
        state["rollout_id"] = state["sampling_args"].pop("seed")
        state["fault"] = self._stream.next()
        self._held.add(state["trajectory_id"])
        drawn = state["fault"].kind
        self._log.note(rollout=state["rollout_id"], session=state["trajectory_id"], drawn=drawn)

    def end(self, state: vf.State) -> None:
        self._held.discard(state["trajectory_id"])

    def is_struck(self, state: vf.State, *kinds: str) -> bool:
        """Whether the rollout is struck now, by a fault of these kinds; then it is in the log."""
        fault: Fault = state["fault"]
        if fault.kind not in kinds:
            return False
        is_shared = fault.kind in SHARED and not self._is_scripted
        if is_shared and self._stream.random.random() * len(self._held) > 1:
            state["fault"] = Fault(kind="")
            return False
        self._log.note(rollout=state["rollout_id"], fault=fault.kind, turn=fault.turn, held=len(self._held))
        return True

    async def strike(self, state: vf.State) -> None:
        """Before a turn."""
        if len(state["trajectory"]) != state["fault"].turn:
            return
        if state["fault"].kind in SHARED:
            await asyncio.sleep(SETTLE_S)
        if not self.is_struck(state, "exception", "await", "block", "kill"):
            return
        if state["fault"].kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if state["fault"].kind == "await":
            await asyncio.sleep(NEVER_S)
        while state["fault"].kind == "block":
            time.sleep(0.01)  # noqa: ASYNC251 - that is the fault
        raise next(self._errors)(f"injected into rollout {state['rollout_id']}")

    def scored(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A reward function that may answer NaN; it must take the state."""

        @functools.wraps(function)
        async def scored(*args: Any, **kwargs: Any) -> float:
            reward: float = await function(*args, **kwargs)
            return float("nan") if self.is_struck(kwargs["state"], "nan") else reward

        return scored


def load_environment(
    environment: str,
    directory: str,
    seed: int,
    rates: Mapping[str, float],
    script: Sequence[str] = (),
    num_turns: int = 1,
    args: Mapping[str, Any] | None = None,
) -> vf.Environment:
    """`environment`, an installed one of at least `num_turns` turns, with `args`; faults are noted in `directory`."""
    inner: vf.MultiTurnEnv = importlib.import_module(environment.replace("-", "_")).load_environment(**(args or {}))
    injector = _Injector(Path(directory), seed, rates, script, num_turns)
    setup_state, respond, cleanup = inner.setup_state, inner.env_response, inner.cleanup

    async def faulty_setup(state: vf.State) -> vf.State | None:
        injector.begin(state)
        state = await setup_state(state) or state
        await injector.strike(state)
        return state

    async def faulty_response(messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        await injector.strike(state)
        return await respond(messages, state, **kwargs)

    async def noted_cleanup(state: vf.State, *args: Any, **kwargs: Any) -> None:
        injector.end(state)
        await cleanup(state, *args, **kwargs)

    inner.setup_state, inner.env_response, inner.cleanup = faulty_setup, faulty_response, noted_cleanup
    own = inner.rubric.rubrics[0]
    own.funcs = [injector.scored(own.funcs[0]), *own.funcs[1:]]
    return inner
