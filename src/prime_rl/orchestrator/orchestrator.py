"""The orchestrator: what is generated, and what is trained on.

    examples --> dispatcher -> env workers --HTTP--> inference server
                    ^             |                     ^
                    |          rollouts                 | POST /update_weights
                    |             v                     |
                scheduler <-- (repair, groups,   weight relay <-- weights/step_n <-- trainer
                    |          scores)                  |                                 ^
                    +--> batches --> rollouts/step_n ---|---------------------------------+
                    ^                                   |
                    +------------- new version ---------+

    loop           consumes          waits for                           unblocked by
    dispatcher     examples          room in the window, and a server    a batch shipped, new weights, a rollout ended
                                                                         or a server that came up (`dispatch`)
    rollout (each) a dispatch        its worker, up to its deadline      the worker; the pool when the worker died
    group (each)   its rollouts      its scores (`generation`)           a thread; a teacher's deadline
    batches        scored groups     a full batch, and weights >= c - k  rollouts; the weight relay
    weight relay   weights/step_n    a complete directory                the trainer
    servers        their health      the next probe                      time (`fleet`)
    loads          their /metrics    the next look                       time (`controller`)
    event loop lag -                 the next beat                       time (`monitors.lag`)
    environment    -                 a worker that is given up           (its end is the run's end)

All state is in the scheduler and the buffer, which are pure; the loops move events in and out of them. A loop that
fails ends the run with its error. This process holds no torch.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from prime_rl import activity
from prime_rl.aio import Supervisor, together
from prime_rl.config.artifacts import NCCLBroadcastConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.data.packing import build_batch
from prime_rl.environments.client import InferenceClient, open_clients
from prime_rl.environments.pool import EnvPool, PoolLimits, environment_spec, open_pools, seeded
from prime_rl.environments.rollouts import EnvironmentSpec
from prime_rl.errors import ConfigError, DeadlineExceeded
from prime_rl.journal import Journal
from prime_rl.logs import get_logger
from prime_rl.monitors.base import JsonlMonitor, Monitor
from prime_rl.monitors.events import EventLog
from prime_rl.monitors.lag import LoopLag
from prime_rl.orchestrator.bench import NoBatches
from prime_rl.orchestrator.broadcasts import Broadcasts
from prime_rl.orchestrator.ckpt import Begins, Start, prepare_start
from prime_rl.orchestrator.concurrency import Concurrency
from prime_rl.orchestrator.controller import Controller, FixedBound, Loads
from prime_rl.orchestrator.dispatch import Dispatcher, Source
from prime_rl.orchestrator.evaluated import PROCESS, RECOVERED
from prime_rl.orchestrator.evaluation import num_trained, open_evaluation
from prime_rl.orchestrator.faults import take_all_counts
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.generation import EndedRollout, Generation, Teacher
from prime_rl.orchestrator.metrics import (
    Clock,
    EndTally,
    Progress,
    batch_metrics,
    log_line,
    progress_metrics,
    readable_rollouts,
    server_metrics,
    too_long_warning,
)
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.scoring import FinishedBatch, ScoredRollout, Scorer, build_scorer
from prime_rl.orchestrator.shipping import BatchSink, NotedBatches
from prime_rl.orchestrator.state import EvaluationState, OrchestratorState, State, encode
from prime_rl.orchestrator.teacher import open_teacher
from prime_rl.orchestrator.traces import open_traces
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import STATE, BatchWriter

NOTICE_INTERVAL_S: Final = 30.0

_logger = get_logger(__name__)


def run(config: OrchestratorConfig) -> None:
    """Produce `max_steps` batches, or until stopped. Raises: PrimeRLError saying what ended the run."""
    if config.deterministic:  # environments may go through sets of words, whose order each process would make up
        os.environ.setdefault("PYTHONHASHSEED", "0")
    asyncio.run(orchestrate(config))


async def orchestrate(config: OrchestratorConfig) -> None:
    """Build everything, run it, tear it down."""
    paths = RunPaths(config.output_dir)
    start = await asyncio.to_thread(prepare_start, config, paths)
    scorer = build_scorer(config)
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog.opened(paths.events))
        clients = await stack.enter_async_context(open_clients(config.client))
        policy = build_policy(config, clients, paths, events)
        stack.callback(policy.close)
        log_dir = paths.logs / "envs" if config.log.env_worker_logs else None
        limits = PoolLimits(setup_s=config.env_setup_timeout, max_restarts=config.max_env_worker_restarts)
        opening = open_pools(_specs(config, start), num_workers=config.workers_per_env, log_dir=log_dir, limits=limits)
        serving = _serve_first_weights(config, start, policy)
        pools, _ = await together(stack.enter_async_context(opening), serving)
        teacher = None
        if config.teacher_model is not None:
            teacher = await stack.enter_async_context(open_teacher(config))
        is_anew = start.how is Begins.ANEW
        evaluation = await stack.enter_async_context(
            open_evaluation(config, pools, policy.fleet, paths, is_anew=is_anew)
        )
        monitor = JsonlMonitor(paths.metrics("orchestrator"))
        stack.callback(monitor.close)
        traces = await stack.enter_async_context(open_traces(config, paths.traces, ended=start.ended()))
        journal = Journal(paths.journal, PROCESS)
        batches = NotedBatches(BatchWriter(paths.rollouts), journal)
        orchestrator = Orchestrator(
            config=config,
            pools=pools,
            policy=policy,
            writer=NoBatches() if config.bench else batches,
            monitor=monitor,
            scorer=scorer,
            extensions=Extensions(teacher=teacher, evaluation=evaluation, on_end=traces.note),
        )
        if not is_anew:
            orchestrator.go_on(start)
            await asyncio.to_thread(journal.note, RECOVERED, step=start.next_batch, how=start.how.value)
            await asyncio.to_thread(batches.catch_up, paths)
        await orchestrator.run()


def _specs(config: OrchestratorConfig, start: Start) -> list[EnvironmentSpec]:
    """What the workers of the training environments need to know."""
    specs = [
        environment_spec(
            env,
            client=config.client,
            model=config.model.name,
            log=config.log,
            retry_s=config.outage_timeout,
            renderer=config.renderer.name,
            hash_keys=config.buffer.hash_keys,
            tells_examples=env.label in start.tells_examples,
        )
        for env in config.env
    ]
    return seeded(specs, config.seed) if config.deterministic else specs


async def _serve_first_weights(config: OrchestratorConfig, start: Start, policy: Policy) -> None:
    """Have the servers serve the weights that the run begins with, or goes on with.

    A run that is resumed at step N does so with weights N, which it waits for, or the older ones that a strict level
    asks for. One that was interrupted takes the newest there are; those that the trainer only sent come as files once
    they are waited for. It begins with older ones where their evaluation was cut off.
    """
    newest_allowed = start.next_batch - (config.max_async_level if config.strict_async_level else 0)
    version = max(0, newest_allowed)
    if start.how is Begins.RECOVERED:
        version = await policy.newest(version)
        if start.cut_off is not None and await policy.newest(min(start.cut_off, version)) == start.cut_off:
            version = start.cut_off
    elif start.how is Begins.RESUMED and config.ckpt is not None:
        await policy.appear(version, config.ckpt.wait_for_weights_timeout or config.weights_timeout)
    # `--bench` leaves the weights as they are.
    again = start.how is Begins.RECOVERED
    await policy.start(config.client.ready_timeout, version=version, adopt=config.bench, again=again)


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


class Evaluation(Source, Protocol):
    """An evaluation beside training."""

    share: float
    """Of the rollouts in flight, while training wants room too; below 1."""
    pools: Sequence[EnvPool]
    """Its own workers."""

    @property
    def is_alone(self) -> bool:
        """Whether training has to wait for it: no rollout is started and no weights are taken. It begins to be alone
        in `on_weights` only."""
        ...

    def on_weights(self, version: int) -> None:
        """Weights of `version` are served now, or from the start."""
        ...

    def metrics(self) -> dict[str, float]:
        """How many rollouts were dispatched for it so far, and what became of them."""
        ...

    def snapshot(self) -> EvaluationState:
        """What it counts."""
        ...

    def restore(self, state: EvaluationState | None, evaluated: Mapping[str, int], repeated: int | None) -> None:
        """Go on where another process left off, before any weights are told; `OnlineEvaluation.restore`."""
        ...

    async def finish(self) -> None:
        """After the last batch: until everything that shall be evaluated is."""
        ...


def _ignore(ended: EndedRollout) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What a run may have besides."""

    teacher: Teacher | None = None
    evaluation: Evaluation | None = None
    controller: Controller = field(default_factory=FixedBound)
    on_end: Callable[[EndedRollout], None] = _ignore
    """Told once of each rollout of training that ended; it must not take time."""


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
        scorer: Scorer,
        extensions: Extensions | None = None,
    ) -> None:
        """`pools` by the labels of the training environments."""
        extensions = extensions or Extensions()
        evaluation = extensions.evaluation
        self._config = config
        self._all_pools = [*pools.values(), *(() if evaluation is None else evaluation.pools)]
        self._policy = policy
        self._fleet = policy.fleet
        self._writer = writer
        self._monitor = monitor
        self._scorer = scorer
        self._evaluation = evaluation
        self._sink = extensions.on_end
        self._supervisor = Supervisor()
        self._generation = Generation(
            config,
            pools,
            self._fleet,
            self._scorer,
            self._supervisor,
            on_end=self._on_end,
            on_change=self._changed,
            teacher=extensions.teacher,
        )
        self._scheduler = self._generation.scheduler
        self._generation.may_start = lambda: not self._is_evaluated_alone
        policy.newest_allowed = self._newest_allowed
        self._pools = pools
        share = 0.0 if evaluation is None else evaluation.share
        sources: dict[str, Source] = {"training": self._generation}
        shares = {"training": 1 - share}
        if evaluation is not None:
            sources["evaluation"], shares["evaluation"] = evaluation, share
        groups = math.ceil(self._scheduler.window / self._scheduler.limits.first_estimate)
        concurrency = _concurrency(config, pools, shares, usual=groups * config.rollouts_per_example)
        self._dispatcher = Dispatcher(
            self._fleet, self._supervisor, concurrency, sources, version=self._least_version, on_end=self._renew_waiting
        )
        self._loads = Loads(self._fleet, concurrency, extensions.controller, on_change=self._dispatcher.wake)
        self._progress = Progress()
        self._ends = EndTally()
        self._lag = LoopLag()
        self._may_ship = asyncio.Event()
        self._waited_for_weights_s = 0.0
        self._waited_for_rollouts_s = 0.0
        self._waiting: activity.Waiting | None = None
        """For what the next batch lacks."""
        self._step_started = self._noticed_at = time.monotonic()

    def go_on(self, start: Start) -> None:
        """Go on where another process left off, with the weights that are served; before `run`.

        Raises: ConfigError as `Start.fitting`.
        """
        served, scheduler = self._policy.version, self._scheduler
        sizes = {label: num_trained(self._config, pool) for label, pool in self._pools.items()}
        fingerprints = {label: pool.size.fingerprints[: sizes[label]] for label, pool in self._pools.items()}
        state = start.fitting(sizes, fingerprints)
        is_repeated = start.cut_off == served < (served if state is None else state.scheduler.version)
        if self._evaluation is not None:
            counts = None if state is None else state.evaluation
            self._evaluation.restore(counts, start.evaluated, served if is_repeated else None)
        if state is None:
            scheduler.next_batch = start.next_batch
        else:
            restored = state.scheduler.version if is_repeated else served
            self._generation.restore(state, served=restored, takes_back=start.how is Begins.RESUMED)
            self._progress = replace(state.progress)
            self._fleet.num_restarts += state.num_restarts
        if served > scheduler.version:
            scheduler.set_version(served)

    async def run(self) -> None:
        """Until every batch is shipped, and evaluated what shall be."""
        self._step_started = self._noticed_at = time.monotonic()
        start = self._supervisor.start
        self._fleet.on_change = self._on_servers
        start("servers", self._fleet.watch(), endless=True)
        start("loads", self._loads.watch(), endless=True)
        start("event loop lag", self._lag.watch(), endless=True)
        if not self._config.bench:
            start("weight relay", self._policy.watch(self._on_weights), endless=True)
        for pool in self._all_pools:
            start(f"environment {pool.label}", pool.watch(), endless=True)
        self._evaluate()
        start("dispatcher", self._dispatcher.run(), endless=True)
        try:
            await self._supervisor.run("batches", self._produce())
        finally:
            self._generation.close()
            _logger.info("%d batches; %s", self._scheduler.next_batch, self._scheduler.counters)

    async def _produce(self) -> None:
        with activity.doing(self._generating):
            await self._produce_batches()
        self._scheduler.close()
        if self._evaluation is not None:
            await self._evaluation.finish()

    # Consumes: scored groups. Waits for: a full batch, and weights that are new enough. Unblocked by: `_changed`.
    async def _produce_batches(self) -> None:
        while not self._scheduler.is_done:
            self._may_ship.clear()
            groups = self._scheduler.take_batch()
            self._dispatcher.wake()  # there is room now, also where groups were left out and there is no batch
            if groups is None:
                await self._wait_to_ship()
            else:
                await self._ship(groups)

    def _renew_waiting(self) -> None:
        """A rollout has ended, of training or of an evaluation, for which training may wait: the servers get on."""
        if self._waiting is not None and not self._waiting.is_for("trainer"):
            self._waiting.renew()

    def _on_end(self, ended: EndedRollout) -> None:
        self._renew_waiting()
        if ended.result is None:
            self._dispatcher.cancel(ended.dispatch.rollout_id)
        self._ends.note(ended)
        self._sink(ended)

    def _on_weights(self, version: int) -> None:
        self._scheduler.set_version(version)
        self._evaluate()
        self._changed()

    def _evaluate(self) -> None:
        if self._evaluation is not None:
            self._evaluation.on_weights(self._policy.version)
        if self._is_evaluated_alone:
            self._generation.interrupt("evaluation")

    @property
    def _is_evaluated_alone(self) -> bool:
        return self._evaluation is not None and self._evaluation.is_alone

    def _least_version(self) -> int:
        """What a server must serve to be given anything."""
        return self._policy.version if self._is_evaluated_alone else self._scheduler.version

    def _newest_allowed(self) -> int | None:
        return self._policy.version if self._is_evaluated_alone else self._scheduler.newest_allowed

    def _on_servers(self) -> None:
        for pool in self._all_pools:
            pool.avoid(self._fleet.down)
        self._changed()

    def _changed(self) -> None:
        self._dispatcher.wake()
        self._may_ship.set()

    async def _wait_to_ship(self) -> None:
        """Until something changed. Raises: DeadlineExceeded when the trainer's weights take too long."""
        for_weights = self._scheduler.waits_for_weights and not self._is_evaluated_alone
        started = time.monotonic()
        # Since the last notice, not since now: something may change all the time, and still no batch be complete.
        wait_s = max(0.0, self._noticed_at + NOTICE_INTERVAL_S - started)
        waiting = self._begin_waiting(for_weights)
        if for_weights:
            wait_s = min(wait_s, max(0.0, waiting.patience_s - waiting.seconds))
        try:
            async with asyncio.timeout(wait_s):  # `wait_for` of Python 3.11 may swallow the end of the run
                await self._may_ship.wait()
        except TimeoutError:
            _logger.info("Waiting for %s", self._what_is_missing())
            self._noticed_at = time.monotonic()
        waited = time.monotonic() - started
        if not for_weights:
            self._waited_for_rollouts_s += waited
            return
        self._waited_for_weights_s += waited
        if self._scheduler.waits_for_weights and waiting.is_overdue:
            raise DeadlineExceeded(
                f"waited {waiting.seconds:.1f} s for {self._what_is_missing()}; look at the trainer's log, "
                "or raise weights_timeout"
            )

    def _begin_waiting(self, for_weights: bool) -> activity.Waiting:
        """The wait that goes on, where it is the same still."""
        owner = "trainer" if for_weights else "inference"
        if self._waiting is None or not self._waiting.is_for(owner):
            self._end_waiting()
            deadline_s = self._config.weights_timeout if for_weights else self._longest_rollout_s
            self._waiting = activity.waiting(owner, self._what_is_missing, deadline_s=deadline_s).begin()
        return self._waiting

    @property
    def _longest_rollout_s(self) -> float:
        """Seconds in which a rollout ends: of training, or of an evaluation, which has the deadline of the run."""
        config = self._config
        of_evaluation = 0.0 if self._evaluation is None else config.max_attempts * 2 * config.rollout_timeout
        return max(config.longest_rollout_s, of_evaluation)

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None

    def _generating(self) -> str:
        """What this process is at, in words."""
        scheduler = self._scheduler
        unit = "groups" if self._config.token_batch_size is None else "tokens"
        there = f"{scheduler.ready_size:.0f} of {scheduler.limits.batch_target} {unit}"
        return f"generating batch {scheduler.next_batch}: {there}"

    def _what_is_missing(self) -> str:
        """What the next batch lacks. Rollouts end by their own deadline, weights by `weights_timeout`."""
        scheduler = self._scheduler
        if self._is_evaluated_alone:
            return f"the evaluation of weights {scheduler.version}"
        if scheduler.waits_for_weights:
            needed = scheduler.next_batch - self._config.max_async_level
            return f"weights {needed} (serving {scheduler.version}) for batch {scheduler.next_batch}"
        what = f"rollouts of batch {scheduler.next_batch}: {scheduler.num_in_flight} are in flight"
        return what + (f"; {scheduler.left_out}" if scheduler.left_out else "")

    async def _ship(self, groups: Sequence[Sequence[ScoredRollout]]) -> None:
        """Log the metrics of a batch, then publish it with the state that goes on from it.

        In this order: what a process that died had logged of a batch that is not complete is dropped, and comes again.
        """
        self._end_waiting()
        step = self._scheduler.next_batch - 1
        async_level = step - self._scheduler.version
        # At once, together: whatever happens from now on belongs to the next batch, in the figures and in the state.
        figures = progress_metrics(self._progress, groups) | self._ends.take()
        failures = take_all_counts(self._generation.faults.values())
        counters = replace(self._scheduler.counters, ends=self._scheduler.counters.ends.copy())
        state = self._snapshot()
        with activity.doing(f"writing batch {step}"):
            finished = await asyncio.to_thread(self._scorer.finish_batch, groups)
            metrics = await asyncio.to_thread(  # it looks at every token
                batch_metrics,
                finished.groups,
                step=step,
                async_level=async_level,
                clock=self._take_clock(),
                failures=failures,
                counters=counters,
                strategy=self._config.trajectory_strategy,
            )
            self._log(step, finished, metrics | figures)
            await asyncio.to_thread(self._publish, step, finished, state)

    def _snapshot(self) -> OrchestratorState:
        generation, config = self._generation, self._config
        return State(
            rollouts_per_example=config.rollouts_per_example,
            in_tokens=config.token_batch_size is not None,
            scheduler=self._scheduler.snapshot(),
            buffer=generation.buffer.snapshot(),
            progress=replace(self._progress),
            faults={env: ledger.snapshot() for env, ledger in generation.faults.items()},
            evaluation=None if self._evaluation is None else self._evaluation.snapshot(),
            num_failovers=generation.num_failovers,
            num_restarts=self._fleet.num_restarts,
        )

    def _take_clock(self) -> Clock:
        """Where the time went since the last call."""
        now = time.monotonic()
        clock = Clock(
            step_s=now - self._step_started,
            wait_for_weights_s=self._waited_for_weights_s,
            generate_s=self._waited_for_rollouts_s,
            update_weights_s=self._policy.update_s,
        )
        self._step_started = self._noticed_at = now
        self._waited_for_weights_s = self._waited_for_rollouts_s = 0.0
        return clock

    def _log(self, step: int, finished: FinishedBatch, metrics: dict[str, float]) -> None:
        generation = self._generation
        metrics |= finished.metrics | server_metrics(self._fleet, generation.num_failovers) | self._loads.metrics()
        metrics |= generation.metrics() | self._lag.take()
        if self._evaluation is not None:
            metrics |= self._evaluation.metrics()
        self._monitor.log(metrics, step=step)
        _logger.info("%s", log_line(step, metrics))
        if warning := too_long_warning(metrics, self._config.seq_len):
            _logger.warning("%s", warning)
        if self._config.log.log_data:
            _logger.info("Batch %d begins with %s", step, finished.groups[0][0].rollout.text)

    def _publish(self, step: int, finished: FinishedBatch, state: OrchestratorState) -> None:
        """Pack and publish one batch, with its rollouts in readable form and the state beside it."""
        batch = build_batch(finished.samples, step=step, seq_len=self._config.seq_len)
        gap = step - batch.min_version
        is_bounded = self._config.bench or 0 <= gap <= self._config.staleness_bound
        assert is_bounded, f"batch {step} holds tokens of weights {batch.min_version}"
        beside = {"rollouts.jsonl": readable_rollouts(finished.groups)}
        if not self._config.bench:
            beside[STATE] = encode(state)
        self._writer.write(batch, beside)


def _concurrency(
    config: OrchestratorConfig, pools: Mapping[str, EnvPool], shares: Mapping[str, float], *, usual: int
) -> Concurrency:
    """Room for the rollouts of a run. Raises: ConfigError where a group that is scored as one has none."""
    scored_as_one = [label for label, pool in pools.items() if pool.size.scores_groups]
    least = {"training": config.rollouts_per_example} if scored_as_one else None
    concurrency = Concurrency(config.max_concurrent, shares, usual=usual, least=least)
    if config.max_concurrent is not None and config.max_concurrent < concurrency.floor:
        raise ConfigError(
            f"max_concurrent = {config.max_concurrent} has no room for a group of {config.rollouts_per_example}, which "
            f"environment {scored_as_one[0]!r} scores as one, and an evaluation beside it; set it to "
            f"{concurrency.floor} or more"
        )
    return concurrency
