"""Tasksets of verifiers' v1 API. Uses nothing that verifiers 0.4 removed.

v1 runs an agent program (a harness) against a local server that intercepts its model calls. A plain taskset, without
tools or a harness of its own, needs one call per task; for it the harness below makes that call inside this process
instead of starting a program for every rollout. Tasksets that bring a harness or an environment run as they say.
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx
import msgspec
import verifiers.v1 as vf
from verifiers.v1.clients import TrainClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

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
from prime_rl.environments.verifiers.traffic import Traffic, openai_client
from prime_rl.errors import EnvironmentSetupError

MAX_TASKS: Final = 10_000
"""Tasks that are taken of a taskset that has no end."""


class OneCallHarness(vf.Harness[vf.HarnessConfig]):
    """Plays a task with a single model call, in process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig, http: httpx.AsyncClient, traffic: Traffic) -> None:
        super().__init__(config)
        self._http = http
        self._traffic = traffic

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        self._traffic.open(trace.id)
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        response = await self._http.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        if response.is_error:
            raise vf.ProviderError(response.text, status_code=response.status_code)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class _Interception(InterceptionServer):
    """verifiers' interception server, calling the model through our HTTP client."""

    def __init__(self, client: TrainClient) -> None:
        super().__init__()
        self._train_client = client

    def register(self, session: RolloutSession) -> tuple[str, str]:
        model_secret, state_secret = super().register(session)
        session.client = self._train_client
        return model_secret, state_secret


class _OneCallEnv(vf.SingleAgentEnv):
    """The plain environment, its agent driven by `OneCallHarness` and calling the model through our HTTP client."""

    harness: OneCallHarness
    interception: _Interception

    async def setup(self, agents: vf.Agents) -> None:
        for agent in agents:
            agent.harness = self.harness
            agent.interception = self.interception


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
    """The environment that plays the taskset: its own where it brings one, else one agent, on this machine."""
    taskset = _taskset_config(spec, "train")
    if vf.environment_class(spec.id) is not vf.SingleAgentEnv:
        return vf.load_environment(vf.env_config_type(spec.id).model_validate({"taskset": taskset}))
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    has_harness = vf.default_harness_id(spec.id) != "bash"
    if has_harness or vf.task_type(spec.id).toolsets(taskset.task):
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))
    agent["harness"] = {"id": "null"}
    return _OneCallEnv(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))


class TasksetEnvironment:
    """An `Environment` over a v1 taskset and the environment that plays it."""

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
        if isinstance(environment, _OneCallEnv):
            client = TrainClient(self._client_config)
            await client.close()
            client.client = openai_client(spec, self._traffic)
            stack.push_async_callback(client.close)
            environment.interception = await stack.enter_async_context(_Interception(client))
            # The interception server is on this machine, where no proxy of the surroundings could reach it.
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            environment.harness = OneCallHarness(vf.HarnessConfig(id="null"), http, self._traffic)
        return self

    def avoid(self, servers: frozenset[str]) -> None:
        self._traffic.transport.avoid(servers)

    async def close(self) -> None:
        await self._stack.aclose()

    async def run(self, request: RolloutRequest) -> Rollout:
        with self._traffic.rollout(request) as route:
            rollout = await self._run(request)
            return msgspec.structs.replace(rollout, failovers=route.num_failovers)

    async def _run(self, request: RolloutRequest) -> Rollout:
        started = time.monotonic()
        task = self._tasks[request.split][request.example]
        sampling = vf.SamplingConfig.model_validate(request.sampling)
        client = self._client_config
        if request.servers and not isinstance(self._environment, _OneCallEnv):
            # A harness of its own sends through its own client: when its server is lost, the rollout begins again.
            client = client.model_copy(update={"base_url": request.servers[0]})
        context = vf.ModelContext(model=self._spec.model, client=client, sampling=sampling)
        try:
            episode = await self._environment.run_episode(task, context)
        except Exception as error:  # noqa: BLE001 - supervision point: an environment's exception is data
            timings = {"total": time.monotonic() - started}
            failure = Failure.of(FailureKind.ENVIRONMENT, error)
            return failed(request, self._spec.label, failure, timings=timings)
        timings = {"total": time.monotonic() - started}
        if len(episode.traces) != 1:
            reasons = "; ".join(error.message for error in episode.errors) or f"{len(episode.traces)} agents took part"
            failure = Failure(kind=FailureKind.ENVIRONMENT, message=reasons)
            return failed(request, self._spec.label, failure, timings=timings)
        return self._rollout(request, episode, episode.traces[0], timings)

    def _rollout(
        self, request: RolloutRequest, episode: vf.Episode, trace: vf.Trace, timings: dict[str, float]
    ) -> Rollout:
        failure = _failure(episode, trace)
        return Rollout(
            id=request.id,
            env=self._spec.label,
            example=request.example,
            failure=failure,
            messages=[message.model_dump(mode="json", exclude_none=True) for message in trace.messages],
            turns=[] if failure else self._turns(trace, request.version),
            reward=trace.reward if failure is None else math.nan,
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
        """One turn per sampled message: its prompt is everything on the path before its sampled tokens."""
        turns: list[Turn] = []
        for branch in trace.branches:
            context: list[int] = []
            for node in branch.nodes:
                sampled = sum(node.mask)
                split = len(node.token_ids) - sampled
                if sampled:
                    completion_ids = node.token_ids[split:]
                    prompt_ids = [*context, *node.token_ids[:split]]
                    versions = self._traffic.versions(
                        trace.id, len(prompt_ids), completion_ids, at_dispatch=at_dispatch
                    )
                    turn = Turn(
                        prompt_ids=prompt_ids,
                        completion_ids=completion_ids,
                        logprobs=node.logprobs,
                        versions=versions,
                    )
                    if turn not in turns:  # a message shared by branches is sampled once
                        turns.append(turn)
                context += node.token_ids
        return turns


def _failure(episode: vf.Episode, trace: vf.Trace) -> Failure | None:
    error = trace.last_error if not trace.ok else next(iter(episode.errors), None)
    if error is not None:
        kind = FailureKind.ENVIRONMENT
        if error.type in ("ProviderError", "InterceptionError"):
            kind = FailureKind.INFERENCE
        elif trace.timing.scoring.start:
            kind = FailureKind.SCORER
        return Failure(kind=kind, type=error.type, message=error.message)
    if not any(node.sampled and node.token_ids for node in trace.nodes):
        if trace.stop_condition == "context_length":
            return Failure(kind=FailureKind.TOO_LONG, message="the prompt does not fit the model's context")
        return Failure(kind=FailureKind.INFERENCE, message="the server sent no token ids for a turn")
    if not trace.last_reply and not trace.assistant_messages[-1].tool_calls:
        return Failure(kind=FailureKind.EMPTY, message="the model ended its turn without saying anything")
    if not trace.rewards or not math.isfinite(trace.reward):
        return Failure(kind=FailureKind.BAD_REWARD, message=f"the rewards are {trace.rewards!r}")
    return None
