"""Evaluation: the model, and the weights of a run, on the evaluation splits of environments.

    for the model itself, then each step of `weights_dir`
        POST /update_weights -> the servers serve it
        for each environment
            examples x rollouts -> env workers -> report
        evals/step_N/<environment>/{results.jsonl,report.json} appear together, complete

The workers are those that training uses. A failed rollout is shown as an error and is in no figure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Final

from rich.console import Console

from prime_rl.aio import Supervisor, together
from prime_rl.config.evals import EvalConfig, EvalEnvConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import InferenceClient, open_clients
from prime_rl.environments.pool import EnvPool, environment_spec, open_pools
from prime_rl.environments.rollouts import FailureKind, Rollout, RolloutRequest, sampling_args
from prime_rl.errors import ArtifactError, ConfigError, EnvironmentSetupError, InferenceError, PrimeRLError
from prime_rl.evals.report import EvalReport, log_line, make_report, report_json, report_table, results_jsonl
from prime_rl.logs import get_logger
from prime_rl.monitors.base import JsonlMonitor
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.manifest import complete_steps, publish_dir

BASE_STEP: Final = 0
NOTICE_INTERVAL_S: Final = 10.0

_logger = get_logger(__name__)


def run(config: EvalConfig) -> None:
    """Evaluate, show a table, write the results. Raises: PrimeRLError saying what is wrong."""
    reports = asyncio.run(evaluate(config))
    base_step = BASE_STEP if config.eval_base else None
    Console(soft_wrap=True).print(report_table(reports, base_step))


async def evaluate(config: EvalConfig) -> list[EvalReport]:
    """Every environment at every step; the results are on disk when this returns."""
    if config.client is None:
        raise ConfigError("eval runs against a server: set client.base_url, or start it through the eval command")
    paths = RunPaths(config.output_dir)
    steps = _steps(config, paths)
    specs = [environment_spec(env, client=config.client, model=config.model.name, log=config.log) for env in config.env]
    log_dir = paths.logs / "envs" if config.log.env_worker_logs else None
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(open_clients(config.client))
        opening = open_pools(specs, num_workers=1, log_dir=log_dir)
        connecting = (_connect(client, config, config.client) for client in clients)
        pools, *_ = await together(stack.enter_async_context(opening), *connecting)
        monitor = JsonlMonitor(paths.metrics("eval"))
        stack.callback(monitor.close)
        evaluation = Evaluation(config=config, clients=clients, pools=pools)
        reports: list[EvalReport] = []
        for step in steps:
            await together(*(_serve(client, config, step) for client in clients))
            found = await evaluation.run(step, paths.evals)
            monitor.log({name: value for report in found for name, value in report.metrics().items()}, step=step)
            reports += found
        return reports


def _steps(config: EvalConfig, paths: RunPaths) -> list[int]:
    """What to evaluate, the base first. Raises: ArtifactError for steps that are missing or were evaluated before."""
    steps = [BASE_STEP] if config.eval_base else []
    if config.weights_dir is not None:
        there = [step for step in complete_steps(config.weights_dir) if step != BASE_STEP]
        wanted = there if config.steps is None else list(config.steps)
        missing = sorted(set(wanted) - set(there))
        if not there:
            raise ArtifactError(f"{config.weights_dir} holds no complete weights; point weights_dir to a run's weights")
        if missing:
            raise ArtifactError(f"{config.weights_dir} holds no complete step {missing[0]}, only {there}")
        steps += wanted
    done = sorted(set(steps) & set(complete_steps(paths.evals)))
    if done:
        raise ArtifactError(f"{step_dir(paths.evals, done[0])} exists already; choose another output_dir or remove it")
    return steps


async def _connect(client: InferenceClient, config: EvalConfig, client_config: ClientConfig) -> None:
    await client.wait_ready(client_config.ready_timeout)
    await client.check_model(config.model.name)


async def _serve(client: InferenceClient, config: EvalConfig, step: int) -> None:
    """Have the server serve the weights of `step`; those of step 0 are the model that it was started with."""
    if step != BASE_STEP:
        assert config.weights_dir is not None
        await client.update_weights(step_dir(config.weights_dir, step), step)
        return
    health = await client.health()
    if health is None or health.version != BASE_STEP or health.digest is not None:
        await client.reload_weights()


class Evaluation:
    """Evaluates environments with whatever the server serves."""

    def __init__(self, *, config: EvalConfig, clients: Sequence[InferenceClient], pools: dict[str, EnvPool]) -> None:
        for env in config.env:
            pool = pools[env.label]
            if pool.size.num_eval == 0:
                raise EnvironmentSetupError(f"environment {pool.label!r} has no evaluation examples")
            if env.skip_first >= pool.size.num_eval:
                raise ConfigError(
                    f"skip_first = {env.skip_first} leaves none of the {pool.size.num_eval} evaluation examples of "
                    f"environment {pool.label!r}"
                )
            if not pool.size.has_eval_split:
                _logger.warning(
                    "Environment %s has no evaluation split: what is reported is on the examples that it trains on",
                    pool.label,
                )
        self._config = config
        self._clients = clients
        self._pools = pools
        self._slots = asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else nullcontext()

    async def run(self, step: int, evals: Path) -> list[EvalReport]:
        """Evaluate all environments and publish `evals/step_N`."""
        reports: list[EvalReport] = []
        with publish_dir(step_dir(evals, step)) as directory:
            for env in self._config.env:
                started = time.monotonic()
                rollouts = await self._evaluate(env, step)
                report = make_report(
                    rollouts,
                    env=env.label,
                    step=step,
                    rollouts_per_example=self._rollouts_per_example(env),
                    seconds=time.monotonic() - started,
                )
                self._check(report, rollouts)
                folder = directory / env.label.replace("/", "_")
                folder.mkdir()
                (folder / "results.jsonl").write_bytes(results_jsonl(rollouts))
                (folder / "report.json").write_bytes(report_json(report))
                reports.append(report)
                _logger.info("%s", log_line(report))
                if self._config.log.log_data:
                    _logger.info("The first rollout of %s is %s", env.label, rollouts[0].text)
        return reports

    def _rollouts_per_example(self, env: EvalEnvConfig) -> int:
        return env.rollouts_per_example or self._config.rollouts_per_example

    def _examples(self, env: EvalEnvConfig, num_eval: int) -> range:
        """Which of the environment's `num_eval` examples."""
        num_examples = self._config.num_examples if env.num_examples is None else env.num_examples
        end = num_eval if num_examples == -1 else min(env.skip_first + num_examples, num_eval)
        return range(env.skip_first, end)

    async def _evaluate(self, env: EvalEnvConfig, step: int) -> list[Rollout]:
        """All rollouts of one environment, example after example."""
        pool = self._pools[env.label]
        requests = [
            self._request(example * self._rollouts_per_example(env) + number, example, step)
            for example in self._examples(env, pool.size.num_eval)
            for number in range(self._rollouts_per_example(env))
        ]
        supervisor = Supervisor()
        supervisor.start(f"environment {env.label}", pool.watch(), endless=True)
        progress = _Progress(env.label, len(requests))
        supervisor.start("progress", progress.log_now_and_then(), endless=True)
        return await supervisor.run("rollouts", together(*(self._roll(pool, item, progress) for item in requests)))

    async def _roll(self, pool: EnvPool, request: RolloutRequest, progress: _Progress) -> Rollout:
        async with self._slots:
            rollout = await pool.run(request)
        progress.done += 1
        if rollout.failure and rollout.failure.kind == FailureKind.INFERENCE:
            for client in self._clients:
                if await client.health() is None:
                    raise InferenceError(
                        f"the inference server at {client.base_url} is gone: {rollout.failure.message}"
                    )
        return rollout

    def _request(self, request_id: int, example: int, version: int) -> RolloutRequest:
        return RolloutRequest(
            id=request_id,
            example=example,
            sampling=sampling_args(self._config.sampling, rollout_id=request_id),
            version=version,
            timeout_s=self._config.rollout_timeout,
            split="eval",
        )

    def _check(self, report: EvalReport, rollouts: Sequence[Rollout]) -> None:
        """An evaluation in which nothing worked has no result."""
        if sum(report.errors.values()) == report.num_rollouts:
            failure = rollouts[0].failure
            raise PrimeRLError(f"all {report.num_rollouts} rollouts of {report.env} failed, the first with {failure}")


class _Progress:
    """Rollouts done of one environment."""

    def __init__(self, env: str, total: int) -> None:
        self.done = 0
        self._env = env
        self._total = total

    async def log_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(NOTICE_INTERVAL_S)
            _logger.info("Evaluating %s: %d of %d rollouts", self._env, self.done, self._total)
