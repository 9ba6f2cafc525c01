"""A worker process: one environment, any number of rollouts at once, in an event loop of its own.

    parent (environments.pool)                         worker (this module)
    EnvironmentSpec          ---- first frame ---->    load the environment
                             <-- WorkerReady | WorkerRefused
    AvoidServers             ---------------------->   requests in flight to lost servers go elsewhere
    RolloutRequest           ---------------------->   a task of its own, under its deadline
                             <---------- Rollout
                             <-- Generated, where groups are scored together
    ScoreGroup               ---------------------->   a task of its own, under its deadline
                             <---------- Rollout, each
    CancelRollout            ---------------------->   the task is cancelled; nothing comes back
                             <------ WorkerState       every second

Consumes: frames of an inherited socket. Waits for: the next frame. Unblocked by: the parent.

Code of the environment that does not give the event loop back within its deadline is interrupted, and what it took is
given back to the rollouts beside it (`watch`). Standard output and error belong to the environment's code and go to the
log that the parent opened: a `print` can never damage a frame. The worker ends when the socket does, and, should its
event loop be stuck in somebody's code, when its parent is gone (`lifeline`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec

from prime_rl.environments.chance import Chance
from prime_rl.environments.fingerprints import fingerprint
from prime_rl.environments.frames import Frames
from prime_rl.environments.rollouts import (
    AvoidServers,
    CancelRollout,
    Environment,
    EnvironmentSpec,
    Failure,
    FailureKind,
    Generated,
    Rollout,
    RolloutRequest,
    ScoreGroup,
    WorkerReady,
    WorkerRefused,
    WorkerState,
    failed,
)
from prime_rl.environments.watch import Overran, Watch, limit_cpu, within
from prime_rl.errors import EnvironmentSetupError
from prime_rl.lifeline import watch_launcher
from prime_rl.logs import get_logger, setup_logging

STATE_INTERVAL_S: Final = 1.0

_logger = get_logger(__name__)


class Worker:
    """The rollouts of one loaded environment."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        environment: Environment,
        frames: Frames,
        watch: Watch,
        chance: Chance | None = None,
    ) -> None:
        """`chance`: what rollouts draw follows from their seeds. None: it does not."""
        self._spec = spec
        self._chance = chance
        self._environment = environment
        self._frames = frames
        self._watch = watch
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, asyncio.Task[None]] = {}
        """Tasks of rollouts that are being generated, by request."""
        self._generated: dict[int, RolloutRequest] = {}
        """Requests whose rollouts the environment keeps, to score them with their groups."""

    async def serve(self) -> None:
        """Run what the parent asks for until it is gone."""
        self._start(self._tell_state(), "state")
        while (message := await self._frames.read()) is not None:
            if isinstance(message, RolloutRequest):
                self._begin(message)
            elif isinstance(message, ScoreGroup):
                requests = [self._generated.pop(i) for i in message.ids]
                self._start(self._score(requests), f"scoring of {message.ids}")
            elif isinstance(message, AvoidServers):
                self._environment.avoid(message.servers)
            elif isinstance(message, CancelRollout):
                self._cancel(message.id)

    async def close(self) -> None:
        """Cancel what still runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environment.close()

    def _begin(self, request: RolloutRequest) -> None:
        task = self._running[request.id] = self._start(self._run(request), f"rollout {request.id}")
        # Not at the end of `_run`, of which nothing runs where the next message cancels it.
        task.add_done_callback(lambda _: self._running.pop(request.id))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, request_id: int) -> None:
        if request_id in self._running:
            self._running[request_id].cancel()
        if self._generated.pop(request_id, None) is not None:
            self._environment.forget(request_id)

    async def _tell_state(self) -> None:
        while True:
            await asyncio.sleep(STATE_INTERVAL_S)
            self._frames.send(WorkerState(lag_s=self._watch.take_lag(), stood_s=self._watch.stood_s))

    async def _run(self, request: RolloutRequest) -> None:
        for rollout in await self._within(request.timeout_s, [request], self._generate(request)):
            self._send(request, rollout)

    async def _generate(self, request: RolloutRequest) -> list[Rollout]:
        """The rollout, unless it has to wait for its group."""
        rollout = await self._environment.run(request)
        if rollout.failure is not None or not (self._environment.scores_groups and request.is_scored):
            return [rollout]
        self._generated[request.id] = request
        self._frames.send(Generated(id=request.id))
        return []

    async def _score(self, requests: Sequence[RolloutRequest]) -> None:
        seconds = self._spec.score_timeout_s or max(request.timeout_s for request in requests)
        ids = [request.id for request in requests]
        rollouts = await self._within(seconds, requests, self._environment.score(ids))
        for request, rollout in zip(requests, rollouts, strict=True):
            self._send(request, rollout)

    async def _within(
        self, seconds: float, requests: Sequence[RolloutRequest], work: Coroutine[Any, Any, list[Rollout]]
    ) -> list[Rollout]:
        """What the environment makes of the requests, or their failure when it takes longer or raises."""
        if self._chance is not None:
            self._chance.own(requests[0].sampling.get("seed", requests[0].example))
        try:
            async with within(seconds):
                return await work
        except (TimeoutError, Overran) as error:
            held = "" if isinstance(error, TimeoutError) else ", and held the event loop of its worker"
            failure = Failure(kind=FailureKind.TIMEOUT, message=f"took longer than {seconds:g} s{held}")
        except Exception as error:  # supervision point: recorded as the rollout's failure
            _logger.exception("Rollout of example %d failed outside the environment", requests[0].example)
            failure = Failure.of(FailureKind.ENVIRONMENT, error)
        timings = {"total": seconds} if failure.kind == FailureKind.TIMEOUT else None
        return [failed(request, self._spec.label, failure, timings=timings) for request in requests]

    def _send(self, request: RolloutRequest, rollout: Rollout) -> None:
        """What the environment put into a rollout may be nothing that can be sent: then that is its failure."""
        try:
            if request.split == "train" and self._spec.hash_keys:
                known_by = fingerprint(self._environment.example(request.example), self._spec.hash_keys)
                rollout = msgspec.structs.replace(rollout, fingerprint=known_by)
            self._frames.send(rollout)
        except Exception as error:  # supervision point: recorded as the rollout's failure
            _logger.exception("Rollout of example %d cannot be sent", request.example)
            self._frames.send(failed(request, self._spec.label, Failure.of(FailureKind.ENVIRONMENT, error)))


async def run_worker(connection: socket.socket) -> None:
    """Load the environment that the first frame names, answer, and serve until the parent is gone."""
    frames = await Frames.over(connection)
    spec = await frames.read()
    if spec is None:
        return
    assert isinstance(spec, EnvironmentSpec), "the parent's first frame names the environment"
    setup_logging(f"env {spec.label}", spec.log_level, as_json=spec.logs_json)
    limit_cpu(num_cpus=spec.num_cpus, first_cpu=spec.first_cpu, niceness=spec.niceness)
    watch = Watch(max_memory_gb=spec.max_memory_gb)
    watch.start()
    chance = None if spec.seed is None else Chance(spec.seed)
    try:
        environment = await importlib.import_module(spec.door).load(spec)
        examples = map(environment.example, range(environment.num_train if spec.tells_examples else 0))
        fingerprints = [fingerprint(example, spec.hash_keys) for example in examples]
    except Exception as error:  # reported: the orchestrator ends with this message
        _logger.exception("The environment cannot be loaded")
        known = isinstance(error, EnvironmentSetupError)
        reason = str(error) if known else f"environment {spec.label!r}: {type(error).__name__}: {error}"
        frames.send(WorkerRefused(message=reason))
        await frames.close()
        return
    watch.forget_lag()  # loading holds the loop
    frames.send(
        WorkerReady(
            num_train=environment.num_train,
            num_eval=environment.num_eval,
            has_eval_split=environment.has_eval_split,
            scores_groups=environment.scores_groups,
            fingerprints=fingerprints,
        )
    )
    worker = Worker(spec, environment, frames, watch, chance)
    try:
        await worker.serve()
    finally:
        await worker.close()
        watch.stop()
        await frames.close()


def main() -> None:
    """Entry of `python -m prime_rl.environments.worker --fd N`."""
    parser = argparse.ArgumentParser(description="Environment worker; started by environments.pool.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    arguments = parser.parse_args()
    watch_launcher(kills_group=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    connection = socket.socket(fileno=arguments.fd)
    connection.set_inheritable(False)  # whoever holds it beside us hides our end from the parent
    asyncio.run(run_worker(connection))
    # Everything is closed. What libraries do at exit takes seconds, in which the orchestrator would wait for us.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
