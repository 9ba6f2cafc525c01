"""Environments of verifiers' classic API: `load_environment()` giving a `vf.Environment` with a rubric."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import verifiers.legacy as vf
from openai import AsyncOpenAI
from verifiers.legacy.types import ClientConfig
from verifiers.legacy.utils.thread_utils import scale_executors

from prime_rl.environments.rollouts import (
    EnvironmentSpec,
    Failure,
    FailureKind,
    Rollout,
    RolloutRequest,
    Split,
    Turn,
    failed,
)
from prime_rl.environments.verifiers.rendering import load_renderer
from prime_rl.environments.verifiers.scorers import noted, watched_rubrics
from prime_rl.environments.verifiers.traffic import SESSION_HEADER, Traffic, openai_client
from prime_rl.environments.watch import Overran, within
from prime_rl.errors import EnvironmentSetupError

NUM_THREADS: Final = 512
"""Most calls that an environment can have running in threads at once; rubrics with processes of their own have one for
each 128. The default of asyncio is a handful."""


class _Client(vf.RendererClient):
    """verifiers' token-in, token-out client, sending through our HTTP client."""

    def __init__(self, spec: EnvironmentSpec, traffic: Traffic) -> None:
        self._spec = spec
        self._traffic = traffic
        config = ClientConfig(
            client_type="renderer",
            api_base_url=spec.base_urls[0],
            api_key_var=spec.api_key_var,
            extra_headers_from_state={SESSION_HEADER: "trajectory_id"},
        )
        super().__init__(config, renderer=load_renderer(spec))

    def setup_client(self, config: ClientConfig) -> AsyncOpenAI:
        return openai_client(self._spec, self._traffic)

    async def raise_from_native_response(self, response: dict[str, Any]) -> None:
        """A turn in which the model said nothing is as good as any: the token that ended it was sampled, so it can be
        learned from. As a failure it would be dispatched again, and a policy that drifts there would never be told."""
        if not (response and response.get("completion_ids")):
            await super().raise_from_native_response(response)

    async def from_native_response(self, response: dict[str, Any]) -> vf.Response:
        """Without a copy, for every turn, of which token of its prompt is of which message: nobody looks at it."""
        return await super().from_native_response(response | {"prompt_attribution": None})

    async def get_response(self, *args: Any, state: vf.State | None = None, **kwargs: Any) -> vf.Response:
        if state is not None:
            self._traffic.open(state["trajectory_id"])
        return await super().get_response(*args, state=state, **kwargs)


async def load(spec: EnvironmentSpec) -> ClassicEnvironment:
    """Raises: EnvironmentSetupError with what the environment's loader, or the building of its data, raised."""
    if spec.agent:
        raise EnvironmentSetupError(
            f"environment {spec.id!r} is of verifiers' classic API, which has no agents; remove agent of environment "
            f"{spec.label!r}, and set what it shall do in args"
        )
    scale_executors(NUM_THREADS)
    try:
        return ClassicEnvironment(spec, vf.load_environment(spec.id, **spec.args))
    except EnvironmentSetupError:
        raise
    except Exception as error:  # the environment's code: whatever it raises is told to the user
        reason = error.__cause__ or error
        raise EnvironmentSetupError(
            f"environment {spec.id!r} cannot be loaded with args {spec.args}: {type(reason).__name__}: {reason}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A rollout that waits for its group to be scored."""

    rollout: Rollout
    state: vf.State


class ClassicEnvironment:
    """An `Environment` over a classic `vf.Environment`."""

    def __init__(self, spec: EnvironmentSpec, environment: vf.Environment) -> None:
        self._spec = spec
        self._environment = environment
        self._traffic = Traffic(spec)
        self._client = _Client(spec, self._traffic)
        self._rows: dict[Split, Any] = {}
        if environment.dataset_source is not None:
            self._rows["train"] = environment.get_dataset()
        # Without an evaluation split of its own, verifiers hands out the training split: that is said, not hidden.
        self.has_eval_split = environment.eval_dataset_source is not None
        self._rows["eval"] = environment.get_eval_dataset()
        self.num_train = len(self._rows.get("train", ()))
        self.num_eval = len(self._rows["eval"])
        self.scores_groups = any(rubric.has_group_rewards for rubric in watched_rubrics(environment.rubric))
        self._kept: dict[int, _Kept] = {}
        self._alone = asyncio.Lock()
        """For scoring again what lost its process."""

    def avoid(self, servers: frozenset[str]) -> None:
        self._traffic.transport.avoid(servers)

    async def close(self) -> None:
        await self._environment._teardown()
        await self._client.close()

    def example(self, index: int) -> dict[str, Any]:
        return dict(self._rows["train"][index])

    async def run(self, request: RolloutRequest) -> Rollout:
        started = time.monotonic()
        row = dict(self._rows[request.split][request.example])
        try:
            with self._traffic.rollout(request) as route:
                state = await self._environment.rollout(row, self._client, self._spec.model, request.sampling)
                seconds = time.monotonic() - started
                rollout = self._rollout(request, state, {"generate": seconds, "score": 0.0, "total": seconds})
                if rollout.failure is None and request.is_scored and not self.scores_groups:
                    (rollout,) = await self._scored([_Kept(rollout=rollout, state=state)])
                rollout = msgspec.structs.replace(rollout, failovers=route.num_failovers)
        except Exception as error:  # noqa: BLE001 - supervision point: an environment's exception is data
            timings = {"total": time.monotonic() - started}
            failure = Failure.of(FailureKind.ENVIRONMENT, error)
            return failed(request, self._spec.label, failure, timings=timings)
        if rollout.failure is None and request.is_scored and self.scores_groups:
            self._kept[request.id] = _Kept(rollout=rollout, state=state)
        return rollout

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        return await self._scored([self._kept.pop(rollout_id) for rollout_id in rollout_ids])

    def forget(self, rollout_id: int) -> None:
        self._kept.pop(rollout_id, None)

    async def _scored(self, group: list[_Kept]) -> list[Rollout]:
        """The rollouts with rewards, or with the failure to score them, which is that of all."""
        started = time.monotonic()
        failure = await self._score([kept.state for kept in group])
        seconds = time.monotonic() - started
        return [_with_reward(kept, failure, seconds) for kept in group]

    async def _score(self, states: list[vf.State]) -> Failure | None:
        """Score in place. verifiers turns an exception of a reward function into 0; here it is a failure."""
        limit_s = self._spec.score_timeout_s
        rubric = self._environment.rubric
        with noted() as errors:
            try:
                async with within(limit_s) as limit:
                    await self._call_rubric(states)
                    if any(isinstance(error, BrokenProcessPool) for error in errors):
                        # One of all the answers that were being checked killed the process: each is checked alone.
                        async with self._alone:
                            errors.clear()
                            await self._call_rubric(states)
                    for state in states:
                        await rubric.cleanup(state)
            except Overran:
                pass  # `limit` tells
            except Exception as error:  # noqa: BLE001 - supervision point: a scorer's exception is data
                errors.append(error)
        if limit.was_cut or limit.has_expired:
            held = " and held the event loop of its worker" if limit.was_cut else ""
            message = f"scoring took longer than {'the rollout may' if limit_s is None else f'{limit_s:g} s'}{held}"
            return Failure(kind=FailureKind.SCORER_TIMEOUT, message=message)
        return Failure.of(FailureKind.SCORER, errors[0]) if errors else None

    async def _call_rubric(self, states: list[vf.State]) -> None:
        rubric = self._environment.rubric
        await (rubric.score_group(states) if self.scores_groups else rubric.score_rollout(states[0]))

    def _rollout(self, request: RolloutRequest, state: vf.State, timings: dict[str, float]) -> Rollout:
        """What was generated, with the reward 0 that it has when nobody scores it."""
        failure = _generation_failure(state)
        turns: list[Turn] = []
        for step in state["trajectory"]:
            turn = self._turn(step, state["trajectory_id"], request.version)
            if turn is None and step["tokens"] is not None and step["tokens"].get("overlong_prompt"):
                message = "the prompt is longer than the environment's max_seq_len"
                failure = failure or Failure(kind=FailureKind.TOO_LONG, message=message)
            elif turn is None:
                message = "the server sent no token ids and logprobs for a turn"
                failure = failure or Failure(kind=FailureKind.INFERENCE, message=message)
            else:
                turns.append(turn)
        return Rollout(
            id=request.id,
            env=self._spec.label,
            example=request.example,
            failure=failure,
            messages=_plain([*(state.get("prompt") or []), *(state.get("completion") or [])]),
            turns=turns,
            reward=0.0 if failure is None else math.nan,
            stop_reason=state.get("stop_condition") or "",
            truncated=bool(state.get("is_truncated")),
            timings=timings,
        )

    def _turn(self, step: Any, session: str, at_dispatch: int) -> Turn | None:
        tokens = step["tokens"]
        if tokens is None or not tokens["completion_ids"]:
            return None
        if len(tokens["completion_logprobs"]) != len(tokens["completion_ids"]):
            return None
        prompt_ids, completion_ids = tuple(tokens["prompt_ids"]), tuple(tokens["completion_ids"])
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=tuple(tokens["completion_logprobs"]),
            versions=self._traffic.versions(session, len(prompt_ids), completion_ids, at_dispatch=at_dispatch),
        )


def _generation_failure(state: vf.State) -> Failure | None:
    error = state.get("error")
    if isinstance(error, vf.EmptyModelResponseError):
        return Failure.of(FailureKind.EMPTY, error)
    if isinstance(error, vf.ModelError):
        return Failure.of(FailureKind.INFERENCE, error)
    if error is not None:
        return Failure.of(FailureKind.ENVIRONMENT, error)
    if state.get("timed_out"):  # verifiers would score what was said until then
        after = f"after {len(state['trajectory'])} turns"
        message = f"the environment's own timeout passed, or its code raised TimeoutError, {after}"
        return Failure(kind=FailureKind.TIMEOUT, message=message)
    if not state["trajectory"]:
        if state.get("prompt_too_long"):
            return Failure(kind=FailureKind.TOO_LONG, message="the prompt does not fit the model's context")
        return Failure(kind=FailureKind.ENVIRONMENT, message="the environment made no model call")
    return None


def _with_reward(kept: _Kept, failure: Failure | None, seconds: float) -> Rollout:
    """The rollout after `seconds` of scoring."""
    reward = kept.state["reward"]
    if failure is None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        failure = Failure(kind=FailureKind.BAD_REWARD, message=f"the reward is {reward!r}")
    timings = kept.rollout.timings
    return msgspec.structs.replace(
        kept.rollout,
        failure=failure,
        reward=float(reward) if failure is None else math.nan,
        metrics=_finite(kept.state.get("metrics") or {}),
        timings=timings | {"score": seconds, "total": timings["generate"] + seconds},
    )


def _finite(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _plain(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as plain JSON data, without the fields that are not set."""
    return [
        message.model_dump(mode="json", exclude_none=True) if hasattr(message, "model_dump") else dict(message)
        for message in messages
    ]
