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
from prime_rl.config.evals import EvalConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.environments.client import InferenceClient, open_clients
from prime_rl.environments.pool import EnvPool, PoolLimits, environment_spec, open_pools
from prime_rl.environments.rollouts import FailureKind, RolloutRequest, sampling_args
from prime_rl.errors import ArtifactError, ConfigError, InferenceError, PrimeRLError
from prime_rl.evals.report import EvalReport, Outcome, failures_text, log_line, make_report, report_table
from prime_rl.evals.results import Results
from prime_rl.evals.rounds import Part, plan_part
from prime_rl.logs import get_logger
from prime_rl.monitors.base import JsonlMonitor
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.manifest import complete_steps

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
        limits = PoolLimits(setup_s=config.env_setup_timeout)
        opening = open_pools(specs, num_workers=1, log_dir=log_dir, limits=limits)
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
        self._parts = [plan_part(env, config, pools[env.label].size) for env in config.env]
        self._config = config
        self._clients = clients
        self._pools = pools
        self._slots = asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else nullcontext()

    async def run(self, step: int, evals: Path) -> list[EvalReport]:
        """Evaluate all environments and publish `evals/step_N`."""
        reports: list[EvalReport] = []
        results = Results(evals, step)
        try:
            for part in self._parts:
                started = time.monotonic()
                progress = _Progress(part.env, len(part.examples) * part.rollouts_per_example)
                outcomes = await self._evaluate(part, step, progress, results)
                report = make_report(
                    outcomes,
                    env=part.env,
                    step=step,
                    rollouts_per_example=part.rollouts_per_example,
                    seconds=time.monotonic() - started,
                    retries=progress.retries,
                )
                if report.num_failed == report.num_rollouts:
                    raise PrimeRLError(failures_text(report))  # an evaluation in which nothing worked has no result
                reports.append(report)
                _logger.info("%s", log_line(report))
            await asyncio.to_thread(results.publish, reports)
        finally:
            results.discard()
        return reports

    async def _evaluate(self, part: Part, step: int, progress: _Progress, results: Results) -> list[Outcome]:
        """All rollouts of one environment, example after example; they are written to `results`."""
        pool = self._pools[part.env]
        requests = [
            self._request(example * part.rollouts_per_example + number, example, step)
            for example in part.examples
            for number in range(part.rollouts_per_example)
        ]
        supervisor = Supervisor()
        supervisor.start(f"environment {part.env}", pool.watch(), endless=True)
        supervisor.start("progress", progress.log_now_and_then(), endless=True)
        rolling = (self._roll(pool, request, progress, results) for request in requests)
        return await supervisor.run("rollouts", together(*rolling))

    async def _roll(self, pool: EnvPool, request: RolloutRequest, progress: _Progress, results: Results) -> Outcome:
        async with self._slots:
            rollout = await pool.run(request)
            while rollout.failure is not None and not rollout.failure.is_own:  # another ended its worker
                progress.retries += 1
                rollout = await pool.run(request)
            await asyncio.to_thread(results.add, pool.label, rollout)
        progress.done += 1
        if progress.done == 1 and self._config.log.log_data:
            _logger.info("The first rollout of %s is %s", pool.label, rollout.text)
        if rollout.failure and rollout.failure.kind == FailureKind.INFERENCE:
            for client in self._clients:
                if await client.health() is None:
                    raise InferenceError(
                        f"the inference server at {client.base_url} is gone: {rollout.failure.message}"
                    )
        return Outcome.of(rollout)

    def _request(self, request_id: int, example: int, version: int) -> RolloutRequest:
        return RolloutRequest(
            id=request_id,
            example=example,
            sampling=sampling_args(self._config.sampling, rollout_id=request_id),
            version=version,
            timeout_s=self._config.rollout_timeout,
            split="eval",
        )


class _Progress:
    """Rollouts done of one environment."""

    def __init__(self, env: str, total: int) -> None:
        self.done = 0
        self.retries = 0
        self._env = env
        self._total = total

    async def log_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(NOTICE_INTERVAL_S)
            _logger.info("Evaluating %s: %d of %d rollouts", self._env, self.done, self._total)
