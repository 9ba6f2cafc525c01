"""The orchestrator: what is generated, and what is trained on.

    examples --> dispatch --> env workers --HTTP--> inference server
                    ^             |                     ^
                    |          rollouts                 | POST /update_weights
                    |             v                     |
                scheduler <-- (repair, groups)     weight relay <-- weights/step_n <-- trainer
                    |                                   |                                 ^
                    +--> batches --> rollouts/step_n ---|---------------------------------+
                    ^                                   |
                    +------------- new version ---------+

    loop           consumes          waits for                           unblocked by
    dispatch       examples          room in the window, and a server    a batch shipped, new weights, a rollout ended
                                                                         or a server that came up
    rollout (each) a dispatch        its worker, up to its deadline      the worker; the pool when the worker died
    batches        finished groups   P groups, and weights >= c - k      rollouts; the weight relay
    weight relay   weights/step_n    a complete directory                the trainer
    servers        their health      the next probe                      time (`fleet`)
    environment    -                 a worker that is given up           (its end is the run's end)

All state is in the scheduler, which is pure; the loops here move events in and out of it. A loop that fails ends the
run with its error. This process holds no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from prime_rl.aio import Supervisor, together
from prime_rl.config.artifacts import NCCLBroadcastConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.data.packing import build_batch
from prime_rl.environments.client import InferenceClient, open_clients
from prime_rl.environments.pool import EnvPool, PoolLimits, environment_spec, open_pools
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, RolloutRequest, sampling_args
from prime_rl.environments.trajectories import longest_sample, training_samples
from prime_rl.errors import ArtifactError, DeadlineExceeded, EnvironmentSetupError, PrimeRLError
from prime_rl.logs import get_logger
from prime_rl.monitors.base import JsonlMonitor, Monitor
from prime_rl.monitors.events import EventLog
from prime_rl.orchestrator.advantages import group_advantages
from prime_rl.orchestrator.bench import BatchSink, NoBatches
from prime_rl.orchestrator.broadcasts import Broadcasts
from prime_rl.orchestrator.faults import FaultLedger
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.metrics import (
    Clock,
    Progress,
    ScoredRollout,
    batch_metrics,
    log_line,
    progress_metrics,
    readable_rollouts,
    server_metrics,
)
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.scheduler import Dispatch, FinishedGroup, Scheduler, SchedulerLimits
from prime_rl.orchestrator.sources import ExampleSource
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.manifest import complete_steps

NOTICE_INTERVAL_S: Final = 30.0

_logger = get_logger(__name__)


def run(config: OrchestratorConfig) -> None:
    """Produce `max_steps` batches, or until stopped. Raises: PrimeRLError saying what ended the run."""
    asyncio.run(orchestrate(config))


async def orchestrate(config: OrchestratorConfig) -> None:
    """Build everything, run it, tear it down."""
    paths = RunPaths(config.output_dir)
    if steps := complete_steps(paths.rollouts):
        raise ArtifactError(
            f"{paths.rollouts} holds {len(steps)} batches of an earlier run; choose another output_dir or remove it"
        )
    specs = [
        environment_spec(
            env, client=config.client, model=config.model.name, log=config.log, retry_s=config.outage_timeout
        )
        for env in config.env
    ]
    log_dir = paths.logs / "envs" if config.log.env_worker_logs else None
    limits = PoolLimits(max_restarts=config.max_env_worker_restarts)
    writer = NoBatches() if config.bench else BatchWriter(paths.rollouts)
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog.opened(paths.events))
        clients = await stack.enter_async_context(open_clients(config.client))
        policy = build_policy(config, clients, paths, events)
        stack.callback(policy.close)
        opening = open_pools(specs, num_workers=config.workers_per_env, log_dir=log_dir, limits=limits)
        # `--bench` leaves the weights as they are.
        starting = policy.start(config.client.ready_timeout, adopt=config.bench)
        pools, _ = await together(stack.enter_async_context(opening), starting)
        monitor = JsonlMonitor(paths.metrics("orchestrator"))
        stack.callback(monitor.close)
        orchestrator = Orchestrator(config=config, pools=pools, policy=policy, writer=writer, monitor=monitor)
        await orchestrator.run()


def build_policy(
    config: OrchestratorConfig, clients: Sequence[InferenceClient], paths: RunPaths, events: EventLog
) -> Policy:
    """The servers of a run and the weights that they serve, not started."""
    fleet = Fleet(
        clients,
        model=config.model.name,
        outage_timeout_s=config.outage_timeout,
        addresses=config.client.base_url,
        on_event=events.write,
    )
    broadcasts = None
    if isinstance(config.weight_broadcast, NCCLBroadcastConfig):
        broadcasts = Broadcasts(fleet, paths.broadcasts, config.weight_broadcast)
    return Policy(fleet, paths.weights, broadcasts=broadcasts, may_reload=config.reload_weights_on_start)


class Orchestrator:
    """The loops of one run, over complete collaborators."""

    def __init__(
        self,
        *,
        config: OrchestratorConfig,
        pools: Mapping[str, EnvPool],
        policy: Policy,
        writer: BatchSink,
        monitor: Monitor,
    ) -> None:
        for pool in pools.values():
            if pool.size.num_train == 0:
                raise EnvironmentSetupError(f"environment {pool.label!r} has no training examples")
        self._config = config
        self._pools = pools
        self._policy = policy
        self._fleet = policy.fleet
        self._num_failovers = 0
        self._writer = writer
        self._monitor = monitor
        self._source = ExampleSource({label: pool.size.num_train for label, pool in pools.items()}, config.seed)
        self._scheduler: Scheduler[Rollout] = Scheduler(
            SchedulerLimits(
                groups_per_batch=config.groups_per_batch,
                rollouts_per_group=config.rollouts_per_example,
                max_async_level=config.max_async_level,
                max_off_policy_steps=config.max_off_policy_steps,
                max_attempts=config.max_attempts,
                max_batches=config.max_steps,
                max_in_flight=config.max_concurrent,
                trains=not config.bench,
            )
        )
        self._faults = FaultLedger(config.max_error_rate, num_judged=config.batch_size)
        self._progress = Progress()
        self._supervisor = Supervisor()
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._may_dispatch = asyncio.Event()
        self._may_ship = asyncio.Event()
        self._waited_for_weights_s = 0.0
        self._waited_for_rollouts_s = 0.0
        self._step_started = time.monotonic()

    async def run(self) -> None:
        """Until every batch is shipped."""
        self._step_started = time.monotonic()
        start = self._supervisor.start
        self._fleet.on_change = self._on_servers
        start("servers", self._fleet.watch(), endless=True)
        if not self._config.bench:
            start("weight relay", self._policy.watch(self._on_weights), endless=True)
        for label, pool in self._pools.items():
            start(f"environment {label}", pool.watch(), endless=True)
        start("dispatch", self._dispatch(), endless=True)
        await self._supervisor.run("batches", self._produce_batches())
        counters = self._scheduler.counters
        _logger.info(
            "%d batches of %d rollouts; %d rollouts failed, %d were cancelled as too old",
            self._scheduler.next_batch, self._config.batch_size, counters.failed, counters.cancelled,
        )  # fmt: skip

    # Consumes: examples. Waits for: room in the window, and a server. Unblocked by: `_changed`.
    async def _dispatch(self) -> None:
        while True:
            self._may_dispatch.clear()
            while self._fleet.may_assign(self._scheduler.version):
                dispatch = self._scheduler.next_dispatch(self._source.next)
                if dispatch is None:
                    break
                name = f"rollout {dispatch.rollout_id}"
                self._rollouts[dispatch.rollout_id] = self._supervisor.start(name, self._roll(dispatch))
            await self._may_dispatch.wait()

    # Consumes: one dispatch. Waits for: its worker, up to the deadline. Unblocked by: the pool, whatever happens.
    async def _roll(self, dispatch: Dispatch) -> None:
        dispatched_at = asyncio.get_running_loop().time()
        try:
            rollout = await self._pools[dispatch.example.env].run(self._request(dispatch))
            self._fleet.release(dispatch.rollout_id)
            self._num_failovers += rollout.failovers
            failure = rollout.failure or self._unfit(rollout, dispatch.version)
            if failure is not None:
                await self._fail(dispatch, failure, dispatched_at)
            elif self._scheduler.is_in_flight(dispatch.rollout_id):
                self._faults.succeeded()
                self._scheduler.succeed(dispatch.rollout_id, rollout)
        finally:
            self._fleet.release(dispatch.rollout_id)
            self._rollouts.pop(dispatch.rollout_id, None)
        self._changed()

    # Consumes: finished groups. Waits for: a full batch, and weights that are new enough. Unblocked by: `_changed`.
    async def _produce_batches(self) -> None:
        while not self._scheduler.is_done:
            self._may_ship.clear()
            groups = self._scheduler.take_batch()
            if groups is None:
                await self._wait_to_ship()
            else:
                self._may_dispatch.set()
                await self._ship(groups)

    async def _fail(self, dispatch: Dispatch, failure: Failure, dispatched_at: float) -> None:
        """Count a failure and have the place filled again. A server that was gone is not the rollout's fault."""
        may_be_outage = failure.kind in (FailureKind.INFERENCE, FailureKind.TIMEOUT)
        was_outage = may_be_outage and await self._fleet.was_disturbed(dispatched_at)
        if not self._scheduler.is_in_flight(dispatch.rollout_id):
            return  # its group was dropped while it ended: it counts as cancelled
        line = self._faults.failed(failure, now=time.monotonic(), is_judged=not was_outage)
        if line is not None:
            _logger.warning("Environment %s: %s", dispatch.example.env, line)
        if (verdict := self._faults.verdict()) is not None:
            raise PrimeRLError(verdict)
        self._cancel(self._scheduler.fail(dispatch.rollout_id, counts=not was_outage))

    def _request(self, dispatch: Dispatch) -> RolloutRequest:
        return RolloutRequest(
            id=dispatch.rollout_id,
            example=dispatch.example.index,
            sampling=sampling_args(self._config.sampling, rollout_id=dispatch.rollout_id),
            version=dispatch.version,
            timeout_s=self._config.rollout_timeout,
            servers=self._fleet.assign(dispatch.rollout_id, dispatch.group, dispatch.version),
        )

    def _unfit(self, rollout: Rollout, at_dispatch: int) -> Failure | None:
        """Why a rollout that went well cannot be trained on. `at_dispatch` is the version served when it began."""
        oldest = min((min(turn.versions, default=at_dispatch) for turn in rollout.turns), default=at_dispatch)
        if oldest < at_dispatch:  # a server that was started again samples until it is brought up to date
            message = f"the server sampled with weights {oldest} after it had served {at_dispatch}: was it restarted?"
            return Failure(kind=FailureKind.INFERENCE, message=message)
        length = longest_sample(rollout)
        if length <= self._config.seq_len:
            return None
        message = f"{length} tokens do not fit seq_len = {self._config.seq_len}; raise it, or lower sampling.max_tokens"
        return Failure(kind=FailureKind.TOO_LONG, message=message)

    def _on_weights(self, version: int) -> None:
        self._cancel(self._scheduler.set_version(version))
        self._changed()

    def _on_servers(self) -> None:
        for pool in self._pools.values():
            pool.avoid(self._fleet.down)
        self._changed()

    def _cancel(self, rollout_ids: Sequence[int]) -> None:
        for rollout_id in rollout_ids:
            if rollout_id in self._rollouts:
                self._rollouts[rollout_id].cancel()

    def _changed(self) -> None:
        self._may_dispatch.set()
        self._may_ship.set()

    async def _wait_to_ship(self) -> None:
        """Until something changed. Raises: DeadlineExceeded when the trainer's weights take too long."""
        for_weights = self._scheduler.waits_for_weights
        notice_s = NOTICE_INTERVAL_S
        if for_weights:
            notice_s = min(notice_s, self._config.weights_timeout - self._waited_for_weights_s)
        started = time.monotonic()
        try:
            await asyncio.wait_for(self._may_ship.wait(), notice_s)
        except TimeoutError:
            _logger.info("Waiting for %s", self._what_is_missing())
        waited = time.monotonic() - started
        if not for_weights:
            self._waited_for_rollouts_s += waited
            return
        self._waited_for_weights_s += waited
        if self._scheduler.waits_for_weights and self._waited_for_weights_s >= self._config.weights_timeout:
            raise DeadlineExceeded(
                f"waited {self._waited_for_weights_s:.1f} s for {self._what_is_missing()}; look at the trainer's log, "
                "or raise weights_timeout"
            )

    def _what_is_missing(self) -> str:
        """What the next batch lacks. Rollouts end by their own deadline, weights by `weights_timeout`."""
        scheduler = self._scheduler
        if scheduler.waits_for_weights:
            needed = scheduler.next_batch - self._config.max_async_level
            return f"weights {needed} (serving {scheduler.version}) for batch {scheduler.next_batch}"
        return f"rollouts of batch {scheduler.next_batch}: {scheduler.num_in_flight} are in flight"

    async def _ship(self, groups: Sequence[FinishedGroup[Rollout]]) -> None:
        step = self._scheduler.next_batch - 1
        async_level = step - self._scheduler.version
        scored = [self._score(group) for group in groups]
        await asyncio.to_thread(self._write, step, scored)
        now = time.monotonic()
        clock = Clock(
            step_s=now - self._step_started,
            wait_for_weights_s=self._waited_for_weights_s,
            generate_s=self._waited_for_rollouts_s,
            update_weights_s=self._policy.update_s,
        )
        self._step_started = now
        self._waited_for_weights_s = self._waited_for_rollouts_s = 0.0
        metrics = batch_metrics(
            scored,
            step=step,
            async_level=async_level,
            clock=clock,
            failures=self._faults.take_counts(),
            counters=self._scheduler.counters,
        )
        metrics |= server_metrics(self._fleet, self._num_failovers)
        metrics |= progress_metrics(self._progress, scored) | {"progress/epoch": float(self._source.epoch)}
        self._monitor.log(metrics, step=step)
        _logger.info("%s", log_line(step, metrics))
        if self._config.log.log_data:
            _logger.info("Batch %d begins with %s", step, scored[0][0].rollout.text)

    def _score(self, group: FinishedGroup[Rollout]) -> list[ScoredRollout]:
        advantages = group_advantages([rollout.reward for rollout in group.results])
        temperature, strategy = self._config.sampling.temperature, self._config.trajectory_strategy
        return [
            ScoredRollout(
                rollout=rollout,
                advantage=advantage,
                samples=training_samples(rollout, advantage=advantage, temperature=temperature, strategy=strategy),
            )
            for rollout, advantage in zip(group.results, advantages, strict=True)
        ]

    def _write(self, step: int, groups: Sequence[Sequence[ScoredRollout]]) -> None:
        """Pack and publish one batch, with its rollouts in readable form beside it."""
        samples = [sample for group in groups for scored in group for sample in scored.samples]
        batch = build_batch(samples, step=step, seq_len=self._config.seq_len)
        gap = step - batch.min_version
        is_bounded = self._config.bench or 0 <= gap <= self._config.staleness_bound
        assert is_bounded, f"batch {step} holds tokens of weights {batch.min_version}"
        self._writer.write(batch, {"rollouts.jsonl": readable_rollouts(groups)})
