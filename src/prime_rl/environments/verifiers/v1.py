"""Tasksets of verifiers' v1 API. Uses nothing that verifiers 0.4 removed.

v1 runs an agent program (a harness) against a local server that intercepts its model calls (`v1_calls`). Tasksets that
bring a harness or an environment run as they say; a plain one is played in this process. The calls of all of them go
through the transport that knows the run's servers, as long as the program runs on this machine.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
import verifiers.v1 as vf

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
from prime_rl.environments.verifiers.rendering import renderer_config
from prime_rl.environments.verifiers.traffic import Traffic, openai_client
from prime_rl.environments.verifiers.v1_calls import Client, Interception, OneCallEnv, OneCallHarness
from prime_rl.environments.watch import Overran, within
from prime_rl.errors import EnvironmentSetupError

MAX_TASKS: Final = 10_000
"""Tasks that are taken of a taskset that has no end."""


async def load(spec: EnvironmentSpec) -> TasksetEnvironment:
    """Raises: EnvironmentSetupError with what the taskset raised or its fields were refused for."""
    try:
        tasks: dict[Split, list[vf.Task]] = {"train": _tasks(spec, "train"), "eval": _tasks(spec, "eval")}
        environment = _environment(spec)
    except Exception as error:  # the taskset's code: whatever it raises is told to the user
        raise EnvironmentSetupError(
            f"taskset {spec.id!r} cannot be loaded with args {spec.args}: {type(error).__name__}: {error}"
        ) from error
    return await TasksetEnvironment.start(spec, environment, tasks)


def _taskset_config(spec: EnvironmentSpec, split: Split) -> vf.TasksetConfig:
    """The taskset's fields. One that has a field `split` gets the split asked for, unless the args name one."""
    kind = vf.taskset_config_type(spec.id)
    args = dict(spec.args)
    if "split" in kind.model_fields:
        args.setdefault("split", split)
    return kind.model_validate({"id": spec.id, **args})


def _tasks(spec: EnvironmentSpec, split: Split) -> list[vf.Task]:
    taskset = vf.load_taskset(_taskset_config(spec, split))
    return list(itertools.islice(taskset, MAX_TASKS if taskset.INFINITE else None))


def _environment(spec: EnvironmentSpec) -> vf.Env:
    """The environment that plays the taskset: its own where it brings one, else one agent, on this machine.

    `spec.agent` holds fields of every agent that it has.
    """
    taskset = _taskset_config(spec, "train")
    kind = vf.env_config_type(spec.id)
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}} | spec.agent
    if vf.environment_class(spec.id) is not vf.SingleAgentEnv:
        roles = {name: agent for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)}
        return vf.load_environment(kind.model_validate({"taskset": taskset, **roles}))
    has_harness = "harness" in agent or vf.default_harness_id(spec.id) != "bash"
    if has_harness or vf.task_type(spec.id).toolsets(taskset.task):
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))
    agent["harness"] = {"id": "null"}
    return OneCallEnv(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))


@dataclass(slots=True, kw_only=True)
class _Scoring:
    """How the scoring of one rollout goes."""

    is_wanted: bool
    limit_s: float | None
    overran: Failure | None = None

    def around(self, task: vf.Task) -> vf.Task:
        """A copy of `task` whose reward functions are called when they are wanted, and within their time."""
        score = task.score

        async def limited(trace: vf.Trace, runtime: vf.Runtime | None = None) -> None:
            if not self.is_wanted:
                return
            try:
                async with within(self.limit_s) as limit:
                    await score(trace, runtime)
            except Overran:
                raise self._timeout(" and held the event loop of its worker") from None
            except TimeoutError:
                if not limit.has_expired:
                    raise
                raise self._timeout("") from None
            if limit.was_cut:
                raise self._timeout(" and held the event loop of its worker")

        copied = copy.copy(task)
        copied.score = limited
        return copied

    def _timeout(self, held: str) -> TimeoutError:
        limit = "the rollout may" if self.limit_s is None else f"{self.limit_s:g} s"
        message = f"scoring took longer than {limit}{held}"
        self.overran = Failure(kind=FailureKind.SCORER_TIMEOUT, message=message)
        return TimeoutError(message)


class TasksetEnvironment:
    """An `Environment` over a v1 taskset and the environment that plays it."""

    scores_groups = False

    def __init__(
        self, spec: EnvironmentSpec, environment: vf.Env, tasks: dict[Split, list[vf.Task]], stack: AsyncExitStack
    ) -> None:
        self._spec = spec
        self._environment = environment
        self._tasks = tasks
        self._stack = stack
        self._traffic = Traffic(spec)
        self._client_config = vf.TrainClientConfig(
            base_url=spec.base_urls[0],
            api_key_var=spec.api_key_var,
            headers=spec.headers,
            renderer=renderer_config(spec),
            renderer_model_name=spec.model,
        )
        self.num_train = len(tasks["train"])
        self.num_eval = len(tasks["eval"])
        self.has_eval_split = _taskset_config(spec, "train") != _taskset_config(spec, "eval")

    @classmethod
    async def start(
        cls, spec: EnvironmentSpec, environment: vf.Env, tasks: dict[Split, list[vf.Task]]
    ) -> TasksetEnvironment:
        """Bring up the servers that rollouts need."""
        stack = AsyncExitStack()
        self = cls(spec, environment, tasks, stack)
        await stack.enter_async_context(environment.serving())
        if environment._runs_local():
            client = Client(self._client_config, self._traffic)
            await client.close()
            client.client = openai_client(spec, self._traffic)
            stack.push_async_callback(client.close)
            secrets = [server.state_secret for server in environment._shared_tools.values() if server.state_secret]
            environment._interception = await stack.enter_async_context(Interception(client, self._traffic, secrets))
        if isinstance(environment, OneCallEnv):
            # The interception server is on this machine, where no proxy of the surroundings could reach it.
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            environment.harness = OneCallHarness(vf.HarnessConfig(id="null"), http)
        return self

    def avoid(self, servers: frozenset[str]) -> None:
        self._traffic.transport.avoid(servers)

    async def close(self) -> None:
        await self._stack.aclose()

    def example(self, index: int) -> dict[str, Any]:
        columns: dict[str, Any] = self._tasks["train"][index].data.model_dump(mode="json", exclude_none=True)
        return columns

    async def run(self, request: RolloutRequest) -> Rollout:
        with self._traffic.rollout(request) as route:
            rollout = await self._run(request)
            return msgspec.structs.replace(rollout, failovers=route.num_failovers)

    async def _run(self, request: RolloutRequest) -> Rollout:
        started = time.monotonic()
        scoring = _Scoring(is_wanted=request.is_scored, limit_s=self._spec.score_timeout_s)
        task = scoring.around(self._tasks[request.split][request.example])
        sampling = vf.SamplingConfig.model_validate(request.sampling)
        client = self._client_config
        if request.servers and not self._environment._runs_local():
            # A harness elsewhere is served by a client of its own: when its server is lost, the rollout begins again.
            client = client.model_copy(update={"base_url": request.servers[0]})
        context = vf.ModelContext(model=self._spec.model, client=client, sampling=sampling)
        try:
            episode = await self._environment.run_episode(task, context)
        except Exception as error:  # noqa: BLE001 - supervision point: an environment's exception is data
            timings = {"total": time.monotonic() - started}
            failure = Failure.of(FailureKind.ENVIRONMENT, error)
            return failed(request, self._spec.label, failure, timings=timings)
        timings = {"total": time.monotonic() - started}
        if len(episode.traces) != 1 or not episode.traces[0].agent.trainable:
            trained = sum(trace.agent.trainable for trace in episode.traces)
            reasons = "; ".join(error.message for error in episode.errors) or (
                f"{len(episode.traces)} agents took part, {trained} of them to be trained; it must be one, and that one"
            )
            failure = Failure(kind=FailureKind.ENVIRONMENT, message=reasons)
            return failed(request, self._spec.label, failure, timings=timings)
        trace = episode.traces[0]
        reason = scoring.overran or self._lost_call(trace) or _failure(episode, trace)
        if reason is None and scoring.is_wanted and not _is_scored(trace):
            reason = Failure(kind=FailureKind.BAD_REWARD, message=f"the rewards are {trace.rewards!r}")
        return self._rollout(request, trace, reason, timings)

    def _lost_call(self, trace: vf.Trace) -> Failure | None:
        """The failure of a model call that was not made again: the program that plays went on without an answer, or
        ended for the want of one, which is no failure of its own."""
        error = self._traffic.failed(trace.id)
        return None if error is None else Failure.of(FailureKind.INFERENCE, error)

    async def score(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        """A taskset scores each rollout in `run`, so none is ever held for its group."""
        assert not rollout_ids, "no rollout of a taskset waits for its group"
        return []

    def forget(self, rollout_id: int) -> None:
        """Nothing is kept."""

    def _rollout(
        self, request: RolloutRequest, trace: vf.Trace, failure: Failure | None, timings: dict[str, float]
    ) -> Rollout:
        return Rollout(
            id=request.id,
            env=self._spec.label,
            example=request.example,
            failure=failure,
            messages=[message.model_dump(mode="json", exclude_none=True) for message in trace.messages],
            turns=[] if failure else self._turns(trace, request.version),
            reward=math.nan if failure else trace.reward if request.is_scored else 0.0,
            metrics={
                name: value
                for name, value in [
                    *trace.metrics.items(),
                    *((name, reward.score) for name, reward in trace.rewards.items() if reward is not None),
                ]
                if value is not None and math.isfinite(value)
            },
            stop_reason=trace.stop_condition or "",
            truncated=trace.is_truncated,
            timings=timings | {"generate": trace.timing.agent.model.duration, "score": trace.timing.scoring.duration},
        )

    def _turns(self, trace: vf.Trace, at_dispatch: int) -> list[Turn]:
        """One turn per model call, in the order of their answers: its prompt is everything on the path to the message
        before its sampled tokens. Two calls with equal tokens are two turns; branches share the turns before them."""
        turns: list[Turn] = []
        for node in trace.nodes:
            if not node.sampled:
                continue
            above: list[vf.MessageNode] = []
            parent = node.parent
            while parent is not None:
                above.append(trace.nodes[parent])
                parent = above[-1].parent
            split = len(node.token_ids) - sum(node.mask)
            context = itertools.chain.from_iterable(one.token_ids for one in reversed(above))
            prompt_ids, completion_ids = (*context, *node.token_ids[:split]), tuple(node.token_ids[split:])
            turns.append(
                Turn(
                    prompt_ids=prompt_ids,
                    completion_ids=completion_ids,
                    logprobs=tuple(node.logprobs),
                    versions=self._traffic.versions(trace.id, len(prompt_ids), completion_ids, at_dispatch=at_dispatch),
                )
            )
        return turns


def _is_scored(trace: vf.Trace) -> bool:
    """Whether every reward function that was to give a reward gave one, and their sum is a number."""
    return bool(trace.rewards) and None not in trace.rewards.values() and math.isfinite(trace.reward)


def _is_whole(node: vf.MessageNode) -> bool:
    """Whether a sampled message has its token ids and a logprob for each."""
    num_sampled = sum(node.mask)
    return 0 < num_sampled == len(node.logprobs) and all(node.mask[-num_sampled:])


def _failure(episode: vf.Episode, trace: vf.Trace) -> Failure | None:
    error = trace.last_error if not trace.ok else next(iter(episode.errors), None)
    if error is not None:
        kind = FailureKind.ENVIRONMENT
        if trace.timing.scoring.start:  # a judge's server is no server of the model
            kind = FailureKind.SCORER
        elif error.type in ("ProviderError", "InterceptionError"):
            kind = FailureKind.INFERENCE
        return Failure(kind=kind, type=error.type, message=error.message)
    if trace.response_rewrites:
        message = "it replaces answers of the model (@vf.intercept), which then cannot be learned from"
        return Failure(kind=FailureKind.ENVIRONMENT, message=message)
    sampled = [node for node in trace.nodes if node.sampled]
    if not sampled and trace.stop_condition == "context_length":
        return Failure(kind=FailureKind.TOO_LONG, message="the prompt does not fit the model's context")
    if not sampled:
        return Failure(kind=FailureKind.ENVIRONMENT, message="the environment made no model call")
    if not all(map(_is_whole, sampled)):
        message = "the server sent no token ids and logprobs for a turn"
        return Failure(kind=FailureKind.INFERENCE, message=message)
    if any(not record["text"].strip() for record in trace.info.get("judge", ())):  # as `vf.Judge` records its calls
        return Failure(kind=FailureKind.SCORER, message="the judge's answer holds no text")
    return None
