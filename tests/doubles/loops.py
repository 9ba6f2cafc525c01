"""Stand-ins for what is around the loops of the orchestrator: workers, servers and a trainer, with random delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.data.samples import TrainingBatch
from prime_rl.environments.pool import PoolLoad
from prime_rl.environments.rollouts import Rollout, RolloutRequest, Turn
from prime_rl.monitors.base import FakeMonitor
from prime_rl.orchestrator.orchestrator import Extensions, Orchestrator
from prime_rl.orchestrator.scoring import build_scorer

Outcome = Callable[[RolloutRequest], dict[str, Any]]
"""What a rollout has instead of a random reward of 0 or 1, given its request."""

LONGER_THAN_SEQ_LEN = 500


class StubFleet:
    """One server that is always up."""

    servers: ClassVar[list[Any]] = []
    down: ClassVar[frozenset[str]] = frozenset()
    num_up, num_restarts = 1, 0

    def may_assign(self, version: int) -> bool:
        return True

    def assign(self, key: Any, group: Any, version: int) -> tuple[str, ...]:
        return ("http://server",)

    def release(self, key: Any) -> None:
        pass

    async def was_disturbed(self, since: float) -> bool:
        return False

    async def watch(self) -> None:
        await asyncio.Event().wait()


class StubTrainer:
    """Takes batches, makes weights of them after a while, and serves some of them: it is sink and policy at once."""

    update_s = 0.0

    def __init__(self, rng: random.Random, delay_s: float) -> None:
        self.fleet = StubFleet()
        self.version = 0
        self.batches: list[TrainingBatch] = []
        self.newest_allowed: Callable[[], int | None] = lambda: None
        self._rng = rng
        self._delay_s = delay_s

    def write(self, batch: TrainingBatch, files: Mapping[str, bytes]) -> None:
        assert batch.step == len(self.batches)
        self.batches.append(batch)

    async def watch(self, on_update: Callable[[int], None]) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.001, self._delay_s))
            allowed, newest = self.newest_allowed(), len(self.batches)
            newest = newest if allowed is None else min(newest, allowed)
            if newest > self.version:
                self.version = self._rng.randint(self.version + 1, newest)
                on_update(self.version)


class StubPool:
    """Workers whose rollouts end after random times. Where groups are scored as one, they wait for each other."""

    load = PoolLoad(num_workers=1, num_live=1, in_flight=0, waiting=0, num_restarts=0, lag_s=0.0)

    def __init__(
        self, label: str, rng: random.Random, trainer: StubTrainer, outcome: Outcome, *, scores_groups: bool = False
    ) -> None:
        self.label = label
        self.size = SimpleNamespace(num_train=40, scores_groups=scores_groups)
        self._rng = rng
        self._trainer = trainer
        self._outcome = outcome
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def avoid(self, servers: frozenset[str]) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def run(self, request: RolloutRequest) -> Rollout:
        version = self._trainer.version
        await self._takes_time()
        turn = Turn(
            prompt_ids=(1, 2), completion_ids=(5, 6), logprobs=(-0.5, -0.5), versions=(version, self._trainer.version)
        )
        rollout = Rollout(
            id=request.id, env=self.label, example=request.example, turns=[turn], reward=float(self._rng.random() < 0.5)
        )
        rollout = msgspec.structs.replace(rollout, **self._outcome(request))
        if rollout.failure is None and self.size.scores_groups:
            await self._others(request)
            rollout = msgspec.structs.replace(rollout, is_group_scored=True, **self._outcome(request))
            await self._takes_time()
        return rollout

    async def _takes_time(self) -> None:
        for _ in range(self._rng.choice([0, 1, 1, 2, 5])):
            await asyncio.sleep(0)
        if self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.uniform(0.0, 0.004))

    async def _others(self, request: RolloutRequest) -> None:
        """Until all of the group are generated."""
        waiting = self._waiting.setdefault(request.group, [])
        waiting.append(mine := asyncio.get_running_loop().create_future())
        try:
            if len(waiting) == request.group_size:
                del self._waiting[request.group]
                for other in waiting:
                    other.set_result(None)
            await mine
        finally:
            if mine in self._waiting.get(request.group, ()):
                self._waiting[request.group].remove(mine)


def too_long(request: RolloutRequest) -> dict[str, Any]:
    """The outcome of a rollout that does not fit a `seq_len` below `LONGER_THAN_SEQ_LEN`."""
    size = LONGER_THAN_SEQ_LEN
    turn = Turn(
        prompt_ids=(1, 2), completion_ids=(5,) * size, logprobs=(-0.5,) * size, versions=(request.version,) * size
    )
    return {"turns": [turn]}


def build(
    config: OrchestratorConfig,
    outcome: Outcome,
    *,
    seed: Any = 0,
    scores_groups: bool = False,
    delay_s: float = 0.004,
    **extensions: Any,
) -> tuple[Orchestrator, StubTrainer, FakeMonitor]:
    """An orchestrator over stand-ins, one pool for each environment of `config`; of them the first may score groups."""
    rng = random.Random(seed)
    trainer, monitor = StubTrainer(rng, delay_s), FakeMonitor()
    scoring: Iterator[bool] = iter([scores_groups, *(False for _ in config.env)])
    pools: dict[str, Any] = {
        env.label: StubPool(env.label, rng, trainer, outcome, scores_groups=next(scoring)) for env in config.env
    }
    policy: Any = trainer
    orchestrator = Orchestrator(
        config=config,
        pools=pools,
        policy=policy,
        writer=trainer,
        monitor=monitor,
        scorer=build_scorer(config),
        extensions=Extensions(**extensions),
    )
    return orchestrator, trainer, monitor
