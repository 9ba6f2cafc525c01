"""A door without verifiers behind it: environments whose rollouts do what their example says. Loads at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prime_rl.environments.rollouts import EnvironmentSpec, Failure, FailureKind, Rollout, RolloutRequest, Turn
from prime_rl.errors import EnvironmentSetupError

UNSENDABLE: Final[dict[Any, Any]] = {"object": object(), "surrogate": "\ud800", "huge": 2**70}


class Scripted:
    """`args["script"]` holds a word per example: ok, right and wrong (rewards 1 and 0), talk (two turns), raise, fail,
    hang, block, exit, long, old, garbled, object, surrogate, huge (contents that no message can hold), unreadable (what
    can be sent but not read), spin, busy, hog, stuck (beyond the reach of signals), fork (leaves a process behind); or
    seconds to take. `args["close_s"]`: seconds to end. `args["scores_groups"]`: scored in groups, each with its
    size as reward; with "score-hangs" in the script for ever, with "score-raises" not at all."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._script = spec.args["script"]
        self.num_train = len(self._script)
        self.num_eval = spec.args.get("num_eval", 0)
        self.has_eval_split = spec.args.get("has_eval_split", True)
        self.scores_groups = spec.args.get("scores_groups", False)
        self._kept: dict[int, Rollout] = {}

    def example(self, index: int) -> dict[str, Any]:
        return {"prompt": str(self._script[index]), "idx": index}

    async def run(self, request: RolloutRequest) -> Rollout:
        what = self._script[request.example % len(self._script)]
        print("to standard output", flush=True)
        await self._misbehave(what)
        if isinstance(what, float):
            await asyncio.sleep(what)
        failure = Failure(kind=FailureKind.SCORER, message="scorer broke") if what == "fail" else None
        length = 500 if what == "long" else 3
        turns = [
            Turn(
                prompt_ids=prompt_ids, completion_ids=[5] * length, logprobs=[-0.5] * length,
                versions=[max(request.version - (what == "old"), 0)] * length,
            )
            for prompt_ids in ([1, 2], [1, 2, 5, 5, 5, 3])[: 2 if what == "talk" else 1]
        ]  # fmt: skip
        reward = {"right": 1.0, "wrong": 0.0}.get(what, request.id % 2.0)
        rollout = Rollout(
            id=request.id, env=self._spec.label, example=request.example, failure=failure, turns=turns,
            reward=reward, messages=[{"role": "user", "content": UNSENDABLE.get(what, str(what))}],
            stop_reason=5 if what == "unreadable" else "",
        )  # fmt: skip
        if failure is None and self.scores_groups:
            self._kept[request.id] = rollout
        return rollout

    async def _misbehave(self, what: Any) -> None:
        if what == "raise":
            raise KeyError("environment broke")
        if what == "garbled":
            raise ValueError("\ud800")
        if what == "exit":
            os._exit(7)
        if what == "hog":
            self._hoard = bytearray(500 << 20)
        if what == "fork" and (child := os.fork()):
            print(f"left {child}", flush=True)
        elif what == "fork":
            time.sleep(600)  # noqa: ASYNC251 - the child: it holds the socket of its parent
            os._exit(0)
        if what in ("hang", "hog"):
            await asyncio.sleep(3600)
        if what == "stuck":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if what in ("block", "stuck"):
            time.sleep(3600)  # noqa: ASYNC251 - a blocked event loop is what it is about
        while what == "spin":
            pass
        for _ in range(12 if what == "busy" else 0):
            time.sleep(0.4)  # noqa: ASYNC251
            await asyncio.sleep(0.01)

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        rollouts = [self._kept.pop(i) for i in rollout_ids]
        if "score-raises" in self._script:
            raise ZeroDivisionError("scorer broke")
        while "score-hangs" in self._script:
            time.sleep(0.01)  # noqa: ASYNC251
        reward = float(len(rollout_ids))
        return [msgspec.structs.replace(rollout, reward=reward) for rollout in rollouts]

    def forget(self, rollout_id: int) -> None:
        del self._kept[rollout_id]
        print(f"forgot; {len(self._kept)} kept", flush=True)

    def avoid(self, servers: frozenset[str]) -> None:
        print(f"avoiding {sorted(servers)}", flush=True)

    async def close(self) -> None:
        await asyncio.sleep(self._spec.args.get("close_s", 0.0))


async def load(spec: EnvironmentSpec) -> Scripted:
    if "refuse" in spec.args:
        raise EnvironmentSetupError(spec.args["refuse"])
    if "crash" in spec.args:
        raise ModuleNotFoundError(spec.args["crash"])
    if "die" in spec.args or os.path.exists(spec.args.get("die_while", "/nowhere")):  # noqa: ASYNC240 - before anything runs
        os._exit(9)
    if os.path.exists(kill := spec.args.get("kill_once", "/nowhere")):  # noqa: ASYNC240 - before anything runs
        os.unlink(kill)
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(slow := spec.args.get("slow_once", "/nowhere")):  # noqa: ASYNC240 - before anything runs
        os.unlink(slow)
        time.sleep(600)  # noqa: ASYNC251 - as a download does
    if "kill" in spec.args:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(spec.args.get("load_s", 0.0))  # noqa: ASYNC251 - as building a data set does
    return Scripted(spec)
