"""Environments of verifiers' classic API: `load_environment()` giving a `vf.Environment` with a rubric."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec
import verifiers.legacy as vf
from openai import AsyncOpenAI
from verifiers.legacy.types import ClientConfig

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
from prime_rl.environments.verifiers.traffic import SESSION_HEADER, Traffic, load_renderer, openai_client
from prime_rl.errors import EnvironmentSetupError

# Exceptions of the reward functions of the rollout that is being scored in the current task.
_scorer_errors: ContextVar[list[Exception]] = ContextVar("_scorer_errors")


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
        super().__init__(config, renderer=load_renderer(spec.model))

    def setup_client(self, config: ClientConfig) -> AsyncOpenAI:
        return openai_client(self._spec, self._traffic)

    async def get_response(self, *args: Any, state: vf.State | None = None, **kwargs: Any) -> vf.Response:
        if state is not None:
            self._traffic.open(state["trajectory_id"])
        return await super().get_response(*args, state=state, **kwargs)


async def load(spec: EnvironmentSpec) -> ClassicEnvironment:
    """Raises: EnvironmentSetupError with what the environment's loader, or the building of its data, raised."""
    try:
        environment = vf.load_environment(spec.id, **spec.args)
        loaded = None if environment.requires_group_rollouts else ClassicEnvironment(spec, environment)
    except Exception as error:  # the environment's code: whatever it raises is told to the user
        reason = error.__cause__ or error
        raise EnvironmentSetupError(
            f"environment {spec.id!r} cannot be loaded with args {spec.args}: {type(reason).__name__}: {reason}"
        ) from error
    if loaded is None:
        raise EnvironmentSetupError(
            f"environment {spec.id!r} has reward functions over whole groups, which are not supported; give it reward "
            "functions of one rollout"
        )
    return loaded


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
        _expose_scorer_errors(environment.rubric)

    def avoid(self, servers: frozenset[str]) -> None:
        self._traffic.transport.avoid(servers)

    async def close(self) -> None:
        await self._environment._teardown()
        await self._client.close()

    async def run(self, request: RolloutRequest) -> Rollout:
        started = time.monotonic()
        row = dict(self._rows[request.split][request.example])
        try:
            with self._traffic.rollout(request) as route:
                state = await self._environment.rollout(row, self._client, self._spec.model, request.sampling)
                generated = time.monotonic()
                failure = _generation_failure(state)
                if failure is None:
                    failure = await self._score(state)
                ended = time.monotonic()
                timings = {"generate": generated - started, "score": ended - generated, "total": ended - started}
                rollout = self._rollout(request, state, failure, timings)
                return msgspec.structs.replace(rollout, failovers=route.num_failovers)
        except Exception as error:  # noqa: BLE001 - supervision point: an environment's exception is data
            timings = {"total": time.monotonic() - started}
            failure = Failure.of(FailureKind.ENVIRONMENT, error)
            return failed(request, self._spec.label, failure, timings=timings)

    async def _score(self, state: vf.State) -> Failure | None:
        """Score in place. verifiers turns an exception of a reward function into 0; here it is a failure."""
        errors: list[Exception] = []
        token = _scorer_errors.set(errors)
        try:
            await self._environment.rubric.score_rollout(state)
            await self._environment.rubric.cleanup(state)
        except Exception as error:  # noqa: BLE001 - supervision point: a scorer's exception is data
            errors.append(error)
        finally:
            _scorer_errors.reset(token)
        if errors:
            return Failure.of(FailureKind.SCORER, errors[0])
        reward = state["reward"]
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            return Failure(kind=FailureKind.BAD_REWARD, message=f"the reward is {reward!r}")
        return None

    def _rollout(
        self, request: RolloutRequest, state: vf.State, failure: Failure | None, timings: dict[str, float]
    ) -> Rollout:
        turns: list[Turn] = []
        for step in state["trajectory"]:
            turn = self._turn(step, state["trajectory_id"], request.version)
            if turn is None:
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
            reward=float(state["reward"]) if failure is None else math.nan,
            metrics=_finite(state.get("metrics") or {}),
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
        prompt_ids, completion_ids = list(tokens["prompt_ids"]), list(tokens["completion_ids"])
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=list(tokens["completion_logprobs"]),
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
    if not state["trajectory"]:
        if state.get("prompt_too_long"):
            return Failure(kind=FailureKind.TOO_LONG, message="the prompt does not fit the model's context")
        if state.get("timed_out"):
            return Failure(kind=FailureKind.TIMEOUT, message="the environment's own timeout passed before a turn")
        return Failure(kind=FailureKind.ENVIRONMENT, message="the environment made no model call")
    return None


def _expose_scorer_errors(rubric: vf.Rubric) -> None:
    """Let exceptions of reward functions be seen before verifiers turns them into 0."""
    rubric.funcs = [_watched(function) for function in rubric.funcs]
    for inner in getattr(rubric, "rubrics", []):
        _expose_scorer_errors(inner)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the same name and signature, noting what it raises."""

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # noted and raised on
            _scorer_errors.get().append(error)
            raise

    return watched


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
