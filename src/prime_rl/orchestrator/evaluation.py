"""Evaluation during training: a second source of rollouts for the dispatcher.

    new weights --> due? --> a round: examples x rollouts --> dispatcher --> env workers --> tables, metrics, files

There are two kinds. `eval` has environments of its own, with their own workers and sampling. `val` looks at examples
of the training environments that are held out of training, sampled as training samples.

A round takes its share of the room, and training has the rest (`concurrency`). Weights are updated meanwhile, so a
round may span several versions, which its report tells; only with `cancel_inflight_rollouts_on_eval` does it run alone,
on one version. While a round runs no other of its kind begins; one that fell due then begins afterwards, with what is
served by then. A failed rollout is in no figure and never counts as a reward of 0: it is counted by its kind. Where the
inference server or a worker was lost, which is not the model's doing, it is run again before that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Literal

from prime_rl import activity
from prime_rl.aio import in_daemon_thread
from prime_rl.config.evals import EvalSamplingConfig
from prime_rl.config.orchestrator import OrchestratorConfig, ValConfig
from prime_rl.config.sampling import TrainSamplingConfig
from prime_rl.environments.pool import EnvPool, PoolLimits, environment_spec, open_pools, seeded
from prime_rl.environments.rollouts import Failure, FailureKind, RolloutRequest, Split, sampling_args
from prime_rl.errors import ArtifactError, DeadlineExceeded, EnvironmentSetupError
from prime_rl.evals.report import failures_text, log_line, table_text
from prime_rl.evals.results import Results
from prime_rl.evals.rounds import Item, Part, Round, Schedule, plan_part
from prime_rl.journal import Journal
from prime_rl.logs import get_logger
from prime_rl.monitors.base import JsonlMonitor, Monitor
from prime_rl.orchestrator.dispatch import Job
from prime_rl.orchestrator.evaluated import BEGUN, COMPLETE, PROCESS
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.groups import End, RolloutCounts
from prime_rl.orchestrator.rounds import seed_of
from prime_rl.orchestrator.state import EvaluationState
from prime_rl.orchestrator.temperature import temperature_at
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.manifest import complete_steps

BASE_STEP: Final = 0
DEFAULT_SHARE: Final = 0.25
"""Of the rollouts in flight, for validation where there is no `[orchestrator.eval]` to say so."""
LOST: Final = (FailureKind.INFERENCE, FailureKind.WORKER_DIED)
"""Failures that are not the doing of model or environment."""
SAVE_TIMEOUT_S: Final = 300.0
"""For a write of results to disk. A disk that takes longer ends the saving of that evaluation, and not the run."""

_logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Suite:
    """One kind of evaluation: what it consists of and when it is due."""

    kind: Literal["eval", "val"]
    schedule: Schedule
    parts: Sequence[Part]
    pools: Mapping[str, EnvPool]
    """By environment."""
    split: Split
    sampling: Callable[[int], TrainSamplingConfig | EvalSamplingConfig]
    """How to sample in the evaluation of a step."""
    runs_alone: bool = False
    round: Round | None = field(default=None, init=False)
    """The one that goes on."""
    results: Results | None = field(default=None, init=False)
    """Its files; None where it is not saved, or cannot be."""
    task: activity.Task | None = field(default=None, init=False)


@asynccontextmanager
async def open_evaluation(
    config: OrchestratorConfig,
    training_pools: Mapping[str, EnvPool],
    fleet: Fleet,
    paths: RunPaths,
    *,
    is_anew: bool = True,
) -> AsyncIterator[OnlineEvaluation | None]:
    """What the run is evaluated on, with its workers; None where it is not. Ends the workers.

    Raises: EnvironmentSetupError, ConfigError where an environment cannot be evaluated on; ArtifactError where the run
        begins anew, and results of an earlier one lie in the way.
    """
    if config.bench or (config.eval is None and config.val is None):
        yield None
        return
    if is_anew and config.eval is not None and (steps := complete_steps(paths.evals)):
        raise ArtifactError(
            f"{step_dir(paths.evals, steps[0])} holds an evaluation of an earlier run; choose another output_dir or "
            "remove it"
        )
    specs = [
        environment_spec(
            env,
            client=config.client,
            model=config.model.name,
            log=config.log,
            retry_s=config.outage_timeout,
            renderer=config.renderer.name,
        )
        for env in (config.eval.env if config.eval is not None else ())
    ]
    log_dir = paths.eval_worker_logs if config.log.env_worker_logs else None
    limits = PoolLimits(setup_s=config.env_setup_timeout, max_restarts=config.max_env_worker_restarts)
    async with open_pools(
        seeded(specs, config.seed) if config.deterministic else specs,
        num_workers=config.workers_per_env,
        log_dir=log_dir,
        limits=limits,
    ) as pools:
        suites = [eval_suite(config, pools)] if config.eval is not None else []
        suites += [val_suite(config, config.val, training_pools)] if config.val is not None else []
        monitor = JsonlMonitor(paths.metrics("eval"))
        evaluation = OnlineEvaluation(
            config, suites, fleet=fleet, monitor=monitor, evals=paths.evals, journal=Journal(paths.journal, PROCESS)
        )
        try:
            yield evaluation
        finally:
            await evaluation.close()
            monitor.close()


def eval_suite(config: OrchestratorConfig, pools: Mapping[str, EnvPool]) -> Suite:
    """`[orchestrator.eval]` over its environments' pools. Raises: EnvironmentSetupError, ConfigError."""
    settings = config.eval
    assert settings is not None
    return Suite(
        kind="eval",
        schedule=Schedule(settings.interval, at_start=settings.eval_base_model, last=config.max_steps),
        parts=[plan_part(env, settings, pools[env.label].size) for env in settings.env],
        pools=pools,
        split="eval",
        sampling=lambda step: settings.sampling,
        runs_alone=settings.cancel_inflight_rollouts_on_eval,
    )


def val_suite(config: OrchestratorConfig, val: ValConfig, pools: Mapping[str, EnvPool]) -> Suite:
    """`[orchestrator.val]` over the training environments' pools. Raises: EnvironmentSetupError."""

    def sampling(step: int) -> TrainSamplingConfig:
        temperature = temperature_at(config.sampling, step, config.max_steps)
        return config.sampling.model_copy(update={"temperature": temperature})

    return Suite(
        kind="val",
        schedule=Schedule(val.interval, at_start=True, last=config.max_steps),
        parts=[
            Part(
                env=label,
                examples=range(num_trained(config, pool), pool.size.num_train),
                rollouts_per_example=val.rollouts_per_example,
            )
            for label, pool in pools.items()
        ],
        pools=pools,
        split="train",
        sampling=sampling,
    )


def num_trained(config: OrchestratorConfig, pool: EnvPool) -> int:
    """How many of an environment's training examples are trained on: the first ones; those behind are held out.

    Raises: EnvironmentSetupError when there are none.
    """
    num_train = pool.size.num_train
    if num_train == 0:
        raise EnvironmentSetupError(f"environment {pool.label!r} has no training examples")
    held_out = 0 if config.val is None else config.val.num_examples
    if held_out >= num_train:
        raise EnvironmentSetupError(
            f"environment {pool.label!r} has {num_train} training examples, and val.num_examples = {held_out} would "
            "hold out all of them; lower it"
        )
    return num_train - held_out


class OnlineEvaluation:
    """The evaluations of a run: an `orchestrator.Evaluation`."""

    def __init__(
        self,
        config: OrchestratorConfig,
        suites: Sequence[Suite],
        *,
        fleet: Fleet,
        monitor: Monitor,
        evals: Path,
        journal: Journal,
    ) -> None:
        """`eval` is saved to `evals/step_N`; both kinds are logged to `monitor`."""
        self.share = DEFAULT_SHARE if config.eval is None else config.eval.share
        self.pools: Sequence[EnvPool] = [
            pool for suite in suites if suite.kind == "eval" for pool in suite.pools.values()
        ]
        self.counts = RolloutCounts()
        """Every attempt counts: used when it ended well, failed by its kind, also where it is run again."""
        self._config = config
        self._suites = list(suites)
        self._fleet = fleet
        self._monitor = monitor
        self._evals = evals
        self._journal = journal
        self._repeated: int | None = None
        """The version that is served again because its evaluation was cut off: until then training waits."""
        self._version = -1
        self._keys = count()
        self._changed = asyncio.Event()
        self._notes = ThreadPoolExecutor(1, "journal")
        """One note after the other."""
        self._saving = asyncio.Lock()
        """One write at a time: of those that a disk does not take, no more than one waits for it."""

    @property
    def is_alone(self) -> bool:
        """Whether a round runs that training has to wait for."""
        rounds = [(suite.round, suite.runs_alone) for suite in self._suites if suite.round is not None]
        return any(runs_alone or round_.step == self._repeated for round_, runs_alone in rounds)

    def snapshot(self) -> EvaluationState:
        """What it counts; how far an evaluation is, is not kept: it is run again."""
        return EvaluationState(dispatched=self.counts.dispatched, ends=list(self.counts.ends.items()))

    def restore(self, state: EvaluationState | None, evaluated: Mapping[str, int], repeated: int | None) -> None:
        """Go on where another process left off; before any weights are told.

        `evaluated`: the version of each kind that was evaluated last. `repeated`: that of an evaluation which was cut
        off, if it is served for its sake, and not for training's.
        """
        if state is not None:
            self.counts = RolloutCounts(dispatched=state.dispatched, ends=Counter(dict(state.ends)))
            if lost := self._num_in_flight:
                self.counts.ends[End(kind="cancelled", why="restarted")] += lost
        self._repeated = repeated
        for suite in self._suites:
            suite.schedule.begin(evaluated.get(suite.kind, -1))

    def on_weights(self, version: int) -> None:
        """Weights of `version` are served now. Begins what is due."""
        self._version = version
        self._begin_due()
        self._changed.set()

    def wants(self, now: float) -> bool:
        """Whether there is a rollout to run."""
        return any(suite.round is not None and suite.round.has_next for suite in self._suites)

    def next(self, now: float) -> Job | None:
        """The next rollout to run."""
        for suite in self._suites:
            if suite.round is not None and suite.round.has_next:
                item = suite.round.next(now)
                self.counts.dispatched += 1
                return Job(
                    key=("evaluation", next(self._keys)),
                    group=(suite.kind, suite.parts[item.part].env, item.example),
                    version=self._version,
                    run=partial(self._roll, suite, suite.round, item),
                )
        return None

    def delay(self, now: float) -> float | None:
        """There is no rate limit."""
        return None

    async def finish(self) -> None:
        """Until the last weights are evaluated. Raises: DeadlineExceeded when they do not come."""
        last, timeout = self._config.max_steps, self._config.weights_timeout
        with activity.waiting("trainer", f"weights {last}", deadline_s=timeout) as waiting:
            while last is not None and self._version < last:
                if waiting.is_overdue:
                    raise DeadlineExceeded(
                        f"waited {waiting.seconds:.1f} s for weights {last} (serving {self._version}) to evaluate; "
                        "look at the trainer's log, or raise weights_timeout"
                    )
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, waiting.patience_s - waiting.seconds)):
                        await self._changed.wait()
        await self._until(lambda: all(suite.round is None for suite in self._suites))  # rollouts have deadlines

    async def close(self) -> None:
        """The run is over, and what is in flight with it: nothing is kept of an evaluation that is not complete."""
        self._notes.shutdown(wait=False)
        if cancelled := self._num_in_flight:
            self.counts.ends[End(kind="cancelled", why="run_over")] += cancelled
        for suite in self._suites:
            if suite.results is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SAVE_TIMEOUT_S):
                        await in_daemon_thread(suite.results.discard)

    def metrics(self) -> dict[str, float]:
        """Totals of the run: dispatched = used + failed + cancelled + in flight; `/<kind>/<why>` for what there was."""
        counts = self.counts
        kinds = {f"evaluation/{kind}": counts.number(kind) for kind in ("used", "failed", "cancelled")}
        why = {f"evaluation/{end.kind}/{end.why}": number for end, number in counts.ends.items() if end.why}
        figures = {"evaluation/dispatched": counts.dispatched, "evaluation/in_flight": self._num_in_flight}
        return {name: float(number) for name, number in (figures | kinds | why).items()}

    @property
    def _num_in_flight(self) -> int:
        return self.counts.dispatched - self.counts.ends.total()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _begin_due(self) -> None:
        for suite in self._suites:
            if suite.round is None and suite.schedule.is_due(self._version):
                suite.schedule.begin(self._version)
                suite.round = Round(suite.parts, self._version)
                suite.results = Results(self._evals, self._version) if suite.kind == "eval" else None
                self._note(BEGUN, suite, suite.round)
                _logger.info("Evaluating weights %d (%s)", self._version, suite.kind)
                suite.task = activity.doing(f"evaluating weights {self._version} ({suite.kind})").begin()

    # Consumes: one item. Waits for: its worker, up to the deadline. Unblocked by: the pool, whatever happens.
    async def _roll(self, suite: Suite, round_: Round, item: Item, servers: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = self._request(suite, round_, item, servers)
        env = suite.parts[item.part].env
        rollout = await suite.pools[env].run(request)
        failure = rollout.failure
        self.counts.ends[End(kind="failed", why=failure.kind.value) if failure else End(kind="used")] += 1
        if failure is not None:
            was_outage = not failure.is_own or await self._was_outage(failure, started)
            if was_outage or (failure.kind in LOST and item.attempt < self._config.max_attempts):
                round_.again(item, counts=not was_outage)
                return
        await self._save(suite, lambda results: results.add(env, rollout))
        round_.end(item, rollout, loop.time())
        if round_.is_done:
            await self._close(suite, round_)

    def _request(self, suite: Suite, round_: Round, item: Item, servers: tuple[str, ...]) -> RolloutRequest:
        sampling, seed = suite.sampling(round_.step), None
        if self._config.deterministic and sampling.seed is None:
            env = suite.parts[item.part].env
            seed = seed_of(self._config.seed, suite.kind, round_.step, env, item.number, item.attempt)
        return RolloutRequest(
            id=item.number,
            example=item.example,
            sampling=sampling_args(sampling, rollout_id=item.number, seed=seed),
            version=self._version,
            timeout_s=self._config.rollout_timeout,
            split=suite.split,
            servers=servers,
        )

    async def _was_outage(self, failure: Failure, started: float) -> bool:
        may_be_outage = failure.kind in (FailureKind.INFERENCE, FailureKind.TIMEOUT)
        return may_be_outage and await self._fleet.was_disturbed(started)

    async def _close(self, suite: Suite, round_: Round) -> None:
        """Tell what was found, and begin what fell due meanwhile."""
        reports = round_.reports()
        await self._save(suite, lambda results: results.publish(reports))
        metrics = {name: value for report in reports for name, value in report.metrics(suite.kind).items()}
        self._monitor.log(metrics, step=round_.step)  # from now on it is not run again
        self._note(COMPLETE, suite, round_)
        for report in reports:
            _logger.info("%s", log_line(report))
            if report.num_failed:
                no_score = "; there is no score" if report.num_failed == report.num_rollouts else ""
                _logger.warning("%s%s", failures_text(report), no_score)
        _logger.info("%s of weights %d:\n%s", suite.kind, round_.step, table_text(reports, BASE_STEP))
        suite.round = suite.results = None
        if suite.task is not None:
            suite.task.end()
        self._begin_due()
        self._changed.set()

    def _note(self, event: str, suite: Suite, round_: Round) -> None:
        """In a thread, which a slow disk may hold up."""
        note = partial(self._journal.note, event, step=round_.step, kind=suite.kind)
        asyncio.get_running_loop().run_in_executor(self._notes, note)

    async def _save(self, suite: Suite, write: Callable[[Results], None]) -> None:
        """Write to the files of the round. Where that fails there are none, which is no reason to end training.

        A disk that hangs holds up no thread that others need.
        """
        results = suite.results
        if results is None:
            return
        async with self._saving:
            if suite.results is not results:
                return  # given up meanwhile
            try:
                async with asyncio.timeout(SAVE_TIMEOUT_S):
                    await in_daemon_thread(partial(write, results))
            except (ArtifactError, TimeoutError) as error:
                suite.results = None
                why = str(error) or f"the disk did not take it within {SAVE_TIMEOUT_S:g} s"
                _logger.warning("The rollouts of this evaluation are not saved: %s", why)
