"""A worker process: one environment, any number of rollouts at once, in an event loop of its own.

    parent (environments.pool)                         worker (this module)
    EnvironmentSpec          ---- first frame ---->    load the environment
                             <-- WorkerReady | WorkerRefused
    AvoidServers             ---------------------->   requests in flight to lost servers go elsewhere
    RolloutRequest           ---------------------->   a task of its own, under its deadline
                             <---------- Rollout
    CancelRollout            ---------------------->   the task is cancelled; nothing comes back

Consumes: frames of an inherited socket. Waits for: the next frame. Unblocked by: the parent.

Standard output and error belong to the environment's code and go to the log that the parent opened: a `print` can never
damage a frame. The worker ends when the socket does, and, should its event loop be stuck in somebody's code, when its
parent is gone (`lifeline`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import socket
from functools import partial

from prime_rl.environments.frames import Frames
from prime_rl.environments.rollouts import (
    AvoidServers,
    CancelRollout,
    Environment,
    EnvironmentSpec,
    Failure,
    FailureKind,
    RolloutRequest,
    WorkerReady,
    WorkerRefused,
    failed,
)
from prime_rl.errors import EnvironmentSetupError
from prime_rl.lifeline import watch_launcher
from prime_rl.logs import get_logger, setup_logging

_logger = get_logger(__name__)


class Worker:
    """The rollouts of one loaded environment."""

    def __init__(self, spec: EnvironmentSpec, environment: Environment, frames: Frames) -> None:
        self._spec = spec
        self._environment = environment
        self._frames = frames
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Run what the parent asks for until it is gone."""
        while (message := await self._frames.read()) is not None:
            if isinstance(message, RolloutRequest):
                task = asyncio.create_task(self._run(message), name=f"rollout {message.id}")
                self._tasks[message.id] = task
                task.add_done_callback(partial(self._forget, message.id))
            elif isinstance(message, AvoidServers):
                self._environment.avoid(message.servers)
            elif isinstance(message, CancelRollout) and message.id in self._tasks:
                self._tasks[message.id].cancel()

    def _forget(self, request_id: int, _: asyncio.Task[None]) -> None:
        del self._tasks[request_id]

    async def close(self) -> None:
        """Cancel what still runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environment.close()

    async def _run(self, request: RolloutRequest) -> None:
        try:
            async with asyncio.timeout(request.timeout_s):
                rollout = await self._environment.run(request)
            self._frames.send(rollout)  # in here: what the environment put into it may be nothing that can be sent
        except TimeoutError:
            message = f"took longer than {request.timeout_s:g} s"
            failure = Failure(kind=FailureKind.TIMEOUT, message=message)
            self._frames.send(failed(request, self._spec.label, failure, timings={"total": request.timeout_s}))
        except Exception as error:  # supervision point: recorded as the rollout's failure
            _logger.exception("Rollout of example %d failed outside the environment", request.example)
            self._frames.send(failed(request, self._spec.label, Failure.of(FailureKind.ENVIRONMENT, error)))


async def run_worker(connection: socket.socket) -> None:
    """Load the environment that the first frame names, answer, and serve until the parent is gone."""
    frames = await Frames.over(connection)
    spec = await frames.read()
    if spec is None:
        return
    assert isinstance(spec, EnvironmentSpec), "the parent's first frame names the environment"
    setup_logging(f"env {spec.label}", spec.log_level, as_json=spec.logs_json)
    try:
        environment = await importlib.import_module(spec.door).load(spec)
    except Exception as error:  # reported: the orchestrator ends with this message
        _logger.exception("The environment cannot be loaded")
        known = isinstance(error, EnvironmentSetupError)
        reason = str(error) if known else f"environment {spec.label!r}: {type(error).__name__}: {error}"
        frames.send(WorkerRefused(message=reason))
        await frames.close()
        return
    frames.send(
        WorkerReady(
            num_train=environment.num_train,
            num_eval=environment.num_eval,
            has_eval_split=environment.has_eval_split,
        )
    )
    worker = Worker(spec, environment, frames)
    try:
        await worker.serve()
    finally:
        await worker.close()
        await frames.close()


def main() -> None:
    """Entry of `python -m prime_rl.environments.worker --fd N`."""
    parser = argparse.ArgumentParser(description="Environment worker; started by environments.pool.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    arguments = parser.parse_args()
    watch_launcher()
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    asyncio.run(run_worker(socket.socket(fileno=arguments.fd)))
    # Everything is closed. What libraries do at exit takes seconds, in which the orchestrator would wait for us.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
