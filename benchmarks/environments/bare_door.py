"""A door without verifiers and without a server: rollouts of many turns, made up after the time that they would take.

With it a load on the orchestrator costs its workers next to nothing, so that the orchestrator is what is measured.
"""

import asyncio
import math
import random
from collections.abc import Sequence

import msgspec

from prime_rl.environments.rollouts import EnvironmentSpec, Rollout, RolloutRequest, Turn

PROMPT_TOKENS = 20
ENV_TOKENS = 16


class MadeUp:
    """`args`: num_turns, num_tokens of a turn, latency_s (median of a turn), spread (of its logarithm), seed, and how
    many of the first rollouts are short (`num_short`: as in `many_turns_env`)."""

    num_train = 512
    num_eval = 0
    has_eval_split = False
    scores_groups = False

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._label = spec.label
        self._args = spec.args
        self._num_short = spec.args["num_short"]
        self._rng = random.Random(spec.args["seed"])
        self._parts: list[list[Turn]] = [self._turns() for _ in range(32)]
        self._text = "letters " * 4

    async def run(self, request: RolloutRequest) -> Rollout:
        args, rng = self._args, self._rng
        seconds, num_turns = 0.0, args["num_turns"]
        if self._num_short > 0:
            self._num_short -= 1
            num_turns = 1 + request.example % num_turns
        for _ in range(num_turns):
            seconds += rng.lognormvariate(math.log(args["latency_s"]), args["spread"]) if args["latency_s"] else 0.0
        await asyncio.sleep(seconds)
        versions = (request.version,) * args["num_tokens"]
        said = {"role": "assistant", "content": self._text}
        return Rollout(
            id=request.id,
            env=self._label,
            example=request.example,
            messages=[{"role": "user", "content": "go on"}, said] * num_turns,
            turns=[msgspec.structs.replace(turn, versions=versions) for turn in rng.choice(self._parts)[:num_turns]],
            reward=rng.random(),
            timings={"generate": seconds, "score": 0.0, "total": seconds},
        )

    def _turns(self) -> list[Turn]:
        turns: list[Turn] = []
        prompt_ids = self._tokens(PROMPT_TOKENS)
        num_tokens = self._args["num_tokens"]
        for _ in range(self._args["num_turns"]):
            completion_ids = self._tokens(num_tokens)
            logprobs = tuple(-self._rng.expovariate(1.0) for _ in completion_ids)
            turns.append(Turn(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=logprobs, versions=()))
            prompt_ids += completion_ids + self._tokens(ENV_TOKENS)
        return turns

    def _tokens(self, number: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(3, 150_000), k=number))

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        raise NotImplementedError("scores_groups is False")

    def forget(self, rollout_id: int) -> None:
        pass

    def avoid(self, servers: frozenset[str]) -> None:
        pass

    async def close(self) -> None:
        pass


async def load(spec: EnvironmentSpec) -> MadeUp:
    return MadeUp(spec)
