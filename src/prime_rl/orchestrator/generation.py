"""What training has generated: examples become rollouts, rollouts groups, and groups are scored and judged.

    buffer --example--> scheduler --dispatch--> dispatcher --> env worker --rollout--> scheduler --complete group-->
        scorer (advantages, filters) --> buffer (worth training on?) --> teacher --> scheduler: accepted, or filtered

All state is in scheduler and buffer, which are pure; here events are moved in and out of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Final, Protocol

import msgspec

from prime_rl.aio import Supervisor, acting_timeout, in_daemon_thread
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.pool import EnvPool
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, RolloutRequest, sampling_args
from prime_rl.environments.trajectories import malformed
from prime_rl.errors import DeadlineExceeded, Hopeless
from prime_rl.logs import get_logger
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.concurrency import RateLimit
from prime_rl.orchestrator.dispatch import Job
from prime_rl.orchestrator.evaluation import num_trained
from prime_rl.orchestrator.faults import FaultLedger
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.groups import ENDS, Dispatch, Ended, FinishedGroup
from prime_rl.orchestrator.limits import scheduler_limits
from prime_rl.orchestrator.rounds import Rounds, seed_of
from prime_rl.orchestrator.scheduler import Scheduler
from prime_rl.orchestrator.scoring import ScoredRollout, Scorer
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.orchestrator.temperature import temperature_at

SCORE_TIMEOUT_S: Final = 120.0
"""For the advantages and samples of a group, which are a matter of milliseconds unless a function of a user hangs."""

MAX_REWARD: Final = 1e30
"""Beyond it, advantages are no float32, and their squares no float64."""

EndedRollout = Ended[Rollout, ScoredRollout]

_logger = get_logger(__name__)


class Teacher(Protocol):
    """Adds what a teacher thinks of them to scored rollouts."""

    async def annotate(self, group: list[ScoredRollout]) -> list[ScoredRollout]:
        """Raises: InferenceError when the teacher cannot be asked for too long."""

    def metrics(self) -> dict[str, float]:
        """What was asked of it since the last call."""
        ...


class Generation:
    """The rollouts of training: a `dispatch.Source`."""

    def __init__(
        self,
        config: OrchestratorConfig,
        pools: Mapping[str, EnvPool],
        fleet: Fleet,
        scorer: Scorer,
        supervisor: Supervisor,
        *,
        on_end: Callable[[EndedRollout], None],
        on_change: Callable[[], None],
        teacher: Teacher | None = None,
    ) -> None:
        """`on_end` is told of every rollout that ended, `on_change` when a group was accepted or filtered.

        Raises: EnvironmentSetupError when an environment has nothing to train on.
        """
        self.buffer = Buffer(
            {label: num_trained(config, pool) for label, pool in pools.items()},
            config.buffer,
            ratios=config.env_ratios,
            seed=config.seed,
        )
        self._rounds: Rounds[Rollout] | None = None
        if config.deterministic:
            self._rounds = Rounds(self.buffer.replace, num_unjudged=lambda: self.scheduler.num_unjudged)
        self.scheduler: Scheduler[Rollout, ScoredRollout] = Scheduler(
            scheduler_limits(config), on_end, self.buffer.replace if self._rounds is None else self._rounds.lose
        )
        self.faults = {label: FaultLedger(config.max_error_rate, num_judged=config.batch_size) for label in pools}
        self.num_failovers = 0
        self.may_start: Callable[[], bool] = lambda: True
        """Whether rollouts may be started now."""
        self._config = config
        self._pools = pools
        self._fleet = fleet
        self._scorer = scorer
        self._supervisor = supervisor
        self._teacher = teacher
        self._on_change = on_change
        self._scoring = asyncio.Lock()
        """One group is scored at a time: threads that compute at once only get in each other's way."""
        per_minute = config.tasks_per_minute
        self._rates = {label: RateLimit(per_minute) for label in pools} if per_minute is not None else {}

    def restore(self, state: OrchestratorState, *, served: int, takes_back: bool) -> None:
        """Go on where `state` was taken, with weights `served`; before anything is run.

        What was in flight is cancelled, and run again. `takes_back`: `Buffer.restore`.
        """
        self.buffer.restore(state.buffer, takes_back=takes_back)
        self.scheduler.restore(state.scheduler, version=served)
        for label, ledger in self.faults.items():
            ledger.restore(state.faults.get(label, ()))
        self.num_failovers = state.num_failovers
        self.interrupt("restarted")
        for group in self.scheduler.unjudged():
            self._judge_in_turn(group)

    def close(self) -> None:
        """The run is over: what is active is cancelled."""
        self.scheduler.close()

    def interrupt(self, why: str) -> None:
        """Cancel what is in flight; it is run again once `may_start` allows."""
        self.scheduler.interrupt(why, [label for label, pool in self._pools.items() if pool.size.scores_groups])

    def wants(self, now: float) -> bool:
        """Whether there is something to run."""
        return self.may_start() and self.scheduler.has_work(self._blocked(now))

    def next(self, now: float) -> Job | None:
        """The next rollout to run. Raises: Hopeless when there are no examples left."""
        dispatch = self.scheduler.next_dispatch(self.buffer.next, blocked=self._blocked(now))
        if dispatch is None:
            return None
        if (rate := self._rates.get(dispatch.example.env)) is not None:
            rate.start(now)
        return Job(
            key=dispatch.rollout_id,
            group=dispatch.group,
            version=dispatch.version,
            run=partial(self._roll, dispatch),
        )

    def delay(self, now: float) -> float | None:
        """Seconds until an environment that has started enough in this minute may start more."""
        return min((wait for rate in self._rates.values() if (wait := rate.wait_s(now)) > 0), default=None)

    def metrics(self) -> dict[str, float]:
        """The state of buffer, scheduler and workers, totals of the run, and what a teacher was asked of late."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        figures = {
            "progress/epoch": self.buffer.epoch,
            "scheduler/in_flight": scheduler.num_in_flight,
            "scheduler/held": scheduler.num_held,
            "scheduler/active_groups": scheduler.num_active_groups,
            "scheduler/dispatched": counters.dispatched,
            "scheduler/groups_filtered": counters.groups_filtered,
            **{f"scheduler/rollouts_{kind}": counters.number(kind) for kind in ENDS},
        }
        for label, pool in self._pools.items():
            figures |= {f"env/{label}/{name}": value for name, value in asdict(pool.load).items()}
        of_teacher = self._teacher.metrics() if self._teacher is not None else {}
        return {name: float(value) for name, value in figures.items()} | self.buffer.metrics() | of_teacher

    def _blocked(self, now: float) -> list[str]:
        return [label for label, rate in self._rates.items() if rate.wait_s(now) > 0]

    # Consumes: one dispatch. Waits for: its worker, up to the deadline. Unblocked by: the pool, whatever happens.
    async def _roll(self, dispatch: Dispatch, servers: tuple[str, ...]) -> None:
        dispatched_at = asyncio.get_running_loop().time()
        rollout = await self._pools[dispatch.example.env].run(self._request(dispatch, servers))
        self.num_failovers += rollout.failovers
        if rollout.failure is None and (unfit := self._unfit(rollout, dispatch.version)) is not None:
            rollout = msgspec.structs.replace(rollout, failure=unfit)
        if rollout.failure is not None:
            await self._fail(dispatch, rollout, rollout.failure, dispatched_at)
        elif self.scheduler.is_in_flight(dispatch.rollout_id):
            group = self.scheduler.succeed(dispatch.rollout_id, rollout)
            ledger, num_members = self.faults[dispatch.example.env], self._config.rollouts_per_example
            if not rollout.is_group_scored:
                ledger.succeeded()
            elif group is not None:  # before, one that cannot be used would make all of them worthless
                ledger.succeeded(num_members)
            if group is not None:
                self._judge_in_turn(group)

    def _request(self, dispatch: Dispatch, servers: tuple[str, ...]) -> RolloutRequest:
        config = self._config
        sampling = config.sampling.model_copy(update={"temperature": self._temperature(dispatch.batch)})
        return RolloutRequest(
            id=dispatch.rollout_id,
            example=dispatch.example.index,
            sampling=sampling_args(sampling, rollout_id=dispatch.rollout_id, seed=self._seed(dispatch)),
            version=dispatch.version,
            timeout_s=config.rollout_timeout,
            servers=servers,
            is_scored=not config.buffer.skip_verification,
            group=dispatch.group,
            group_size=config.rollouts_per_example,
        )

    def _seed(self, dispatch: Dispatch) -> int | None:
        """By which a deterministic run samples a rollout; its id says when it was started, and no more."""
        config = self._config
        if not config.deterministic:
            return None
        seed = config.seed if config.sampling.seed is None else config.sampling.seed
        return seed_of(seed, "train", dispatch.group, dispatch.place, dispatch.attempt)

    def _temperature(self, batch: int) -> float:
        """That of a group which was started for this batch."""
        return temperature_at(self._config.sampling, batch, self._config.max_steps)

    async def _fail(self, dispatch: Dispatch, rollout: Rollout, failure: Failure, dispatched_at: float) -> None:
        """Count a failure and have the place filled again; in a group that was scored as one, all its places."""
        may_count = failure.is_own or failure.is_counted
        is_judged = may_count and not await self._was_outage(rollout, failure, dispatched_at)
        counts = is_judged and failure.is_own
        if not self.scheduler.is_in_flight(dispatch.rollout_id):
            return  # its group was dropped while it ended: it counts as cancelled
        env, is_whole = dispatch.example.env, rollout.is_group_scored
        num_lost = self._config.rollouts_per_example if is_whole else 1
        ledger = self.faults[env]
        line = ledger.failed(failure, now=time.monotonic(), num_judged=num_lost if counts else int(is_judged))
        if line is not None:
            _logger.warning("Environment %s: %s", env, line)
        if (verdict := ledger.verdict()) is not None:
            raise Hopeless(f"environment {env!r}: {verdict}")
        self.scheduler.fail(dispatch.rollout_id, rollout, failure.kind.value, counts=counts, is_whole=is_whole)
        if self._rounds is not None:
            self._judge_round(self._rounds)  # it may have been the last that was waited for

    async def _was_outage(self, rollout: Rollout, failure: Failure, dispatched_at: float) -> bool:
        """Whether it failed because a server was gone."""
        was_generated = failure.kind is FailureKind.TIMEOUT and rollout.is_group_scored
        may_be = failure.kind in (FailureKind.INFERENCE, FailureKind.TIMEOUT) and not was_generated
        return may_be and await self._fleet.was_disturbed(dispatched_at)

    def _unfit(self, rollout: Rollout, at_dispatch: int) -> Failure | None:
        """Why a rollout that went well cannot be trained on. `at_dispatch` is the version served when it began."""
        if fault := malformed(rollout):
            return Failure(kind=FailureKind.INFERENCE, message=fault)
        if not abs(rollout.reward) <= MAX_REWARD:  # nor is a NaN
            message = f"the reward is {rollout.reward}; it must be a number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
            return Failure(kind=FailureKind.BAD_REWARD, message=message)
        versions = [version for turn in rollout.turns for version in turn.versions]
        oldest, newest, newest_made = min(versions), max(versions), self.scheduler.next_batch
        if oldest < at_dispatch:  # a server that was started again samples until it is brought up to date
            message = f"the server sampled with weights {oldest} after it had served {at_dispatch}: was it restarted?"
        elif newest > newest_made and not self._config.bench:  # weights n are made of batch n - 1, which has shipped
            message = f"the server sampled with weights {newest}, newer than {newest_made}: are they of another run?"
        else:
            return None
        return Failure(kind=FailureKind.INFERENCE, message=message)

    def _judge_in_turn(self, group: FinishedGroup[Rollout]) -> None:
        """At once, or in a round of a deterministic run."""
        if self._rounds is None:
            self._supervisor.start(f"group {group.number}", self._judge(group))
            return
        self._rounds.complete(group)
        self._judge_round(self._rounds)

    def _judge_round(self, rounds: Rounds[Rollout]) -> None:
        async def judge(groups: list[FinishedGroup[Rollout]]) -> None:
            for group in groups:
                await self._judge(group)
            rounds.settle()

        if groups := rounds.take():
            self._supervisor.start(f"groups {groups[0].number} to {groups[-1].number}", judge(groups))
        else:
            rounds.settle()
            self._on_change()

    # Consumes: a complete group. Waits for: its scores, and a teacher. Unblocked by: a thread, and deadlines of both.
    async def _judge(self, group: FinishedGroup[Rollout]) -> None:
        """Score a group, and accept it or have it replaced."""
        scored = await self._score(group)
        if not self.scheduler.is_active(group.number):
            return  # it became too old meanwhile
        rewards = [rollout.reward for rollout in group.results]
        if why := self.buffer.judge(group.example, rewards, group.results[0].fingerprint):
            self.scheduler.filter(group.number, why)
        else:
            if self._teacher is not None:
                scored = await self._teacher.annotate(scored)
            in_tokens = self._config.token_batch_size is not None
            size = sum(one.num_tokens for one in scored if not one.filtered_by) if in_tokens else 1
            filtered = [one.filtered_by for one in scored]
            self.scheduler.accept(group.number, scored, size=size, filtered=filtered)
        self._on_change()

    async def _score(self, group: FinishedGroup[Rollout]) -> list[ScoredRollout]:
        """In a thread: a long group, or a slow function of a user, would hold up all the others."""
        score = partial(self._scorer.score_group, group, temperature=self._temperature(group.batch))
        async with self._scoring:
            try:
                async with acting_timeout(SCORE_TIMEOUT_S):
                    return await in_daemon_thread(score)
            except TimeoutError:
                example = group.example
                raise DeadlineExceeded(
                    f"{self._scorer.name(example.env)} took longer than {SCORE_TIMEOUT_S:g} s on a group of "
                    f"environment {example.env!r}, example {example.index}; what needs long, such as a model or "
                    "another service, belongs into the environment's rubric, see docs/algorithms.md"
                ) from None
