"""A door without verifiers behind it: environments whose rollouts do what their example says. Loads at once."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Final

from prime_rl.environments.rollouts import EnvironmentSpec, Failure, FailureKind, Rollout, RolloutRequest, Turn
from prime_rl.errors import EnvironmentSetupError

UNSENDABLE: Final[dict[Any, Any]] = {"object": object(), "surrogate": "\ud800", "huge": 2**70}


class Scripted:
    """`args["script"]` holds a word per example: ok, talk (two turns), raise, fail, hang, block, exit, long, old,
    garbled, object, surrogate, huge (contents that no message can hold); or seconds to take."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._script = spec.args["script"]
        self.num_train = len(self._script)
        self.num_eval = spec.args.get("num_eval", 0)
        self.has_eval_split = spec.args.get("has_eval_split", True)

    async def run(self, request: RolloutRequest) -> Rollout:
        what = self._script[request.example % len(self._script)]
        print("to standard output", flush=True)
        if what == "raise":
            raise KeyError("environment broke")
        if what == "garbled":
            raise ValueError("\ud800")
        if what == "hang":
            await asyncio.sleep(3600)
        if what == "block":
            time.sleep(3600)  # noqa: ASYNC251 - a blocked event loop is what it is about
        if what == "exit":
            os._exit(7)
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
        return Rollout(
            id=request.id, env=self._spec.label, example=request.example, failure=failure, turns=turns,
            reward=float(request.id % 2), messages=[{"role": "user", "content": UNSENDABLE.get(what, str(what))}],
        )  # fmt: skip

    def avoid(self, servers: frozenset[str]) -> None:
        print(f"avoiding {sorted(servers)}", flush=True)

    async def close(self) -> None:
        pass


async def load(spec: EnvironmentSpec) -> Scripted:
    if "refuse" in spec.args:
        raise EnvironmentSetupError(spec.args["refuse"])
    if "crash" in spec.args:
        raise ModuleNotFoundError(spec.args["crash"])
    if "die" in spec.args:
        os._exit(9)
    return Scripted(spec)
