"""The parent's side of environment workers: starts them, spreads rollouts over them, and survives their deaths.

    run(request) --> least-loaded live worker --> Rollout
                     dead worker               -> `worker_died` for everything it held, and a new worker
                     deadline passed           -> the worker ends the rollout (`timeout`); a worker whose event loop
                                                  is stuck in somebody's code cannot, and is killed

Every request ends in exactly one Rollout, unless the caller cancels it. No torch and no verifiers in here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from prime_rl import lifeline
from prime_rl.config.shared import ClientConfig, EnvConfig, LogConfig
from prime_rl.environments.frames import Frames
from prime_rl.environments.rollouts import (
    AvoidServers,
    CancelRollout,
    EnvironmentSpec,
    Failure,
    FailureKind,
    Rollout,
    RolloutRequest,
    WorkerReady,
    WorkerRefused,
    failed,
)
from prime_rl.errors import EnvironmentSetupError
from prime_rl.logs import get_logger

T = TypeVar("T", RolloutRequest, Rollout)

POLL_S: Final = 0.02

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Patience with workers."""

    setup_s: float = 300.0
    """Seconds a worker may take to load its environment."""
    grace_s: float = 10.0
    """Seconds past a rollout's deadline after which its worker counts as stuck and is killed."""
    close_s: float = 5.0
    """Seconds a worker may take to end by itself."""
    max_restarts: int = 5
    """Times in a row, without a rollout completed in between, that a worker which died is replaced; -1: always."""


class EnvPool:
    """The workers of one environment. Made by `open_pools`."""

    def __init__(self, spec: EnvironmentSpec, workers: list[_Worker]) -> None:
        self.label = spec.label
        self._workers = workers
        self._next_id = 0

    @property
    def size(self) -> WorkerReady:
        """Sizes of the environment's splits."""
        ready = self._workers[0].ready
        assert ready is not None, "a pool is handed out once its workers are ready"
        return ready

    @property
    def num_restarts(self) -> int:
        """Workers that were replaced since the pool was opened."""
        return sum(worker.num_restarts for worker in self._workers)

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run one rollout. Raises: EnvironmentSetupError when no worker can be brought up any more."""
        worker = await self._least_loaded()
        self._next_id += 1
        rollout = await worker.run(request, wire_id=self._next_id)
        assert rollout.env == self.label
        return rollout

    def avoid(self, servers: frozenset[str]) -> None:
        """Tell the workers, and those that come after them, that these servers are lost, and no others."""
        for worker in self._workers:
            worker.avoid(servers)

    async def watch(self) -> None:
        """Returns never; raises EnvironmentSetupError when a worker is given up. For a supervisor."""
        await asyncio.gather(*(asyncio.shield(worker.served) for worker in self._workers))

    async def wait_live(self) -> None:
        """Until every worker has loaded the environment. Raises: EnvironmentSetupError."""
        for worker in self._workers:
            await worker.wait_live()

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _least_loaded(self) -> _Worker:
        while True:
            live = [worker for worker in self._workers if worker.is_live]
            if live:
                return min(live, key=lambda worker: worker.load)
            waits = [asyncio.ensure_future(worker.became_live.wait()) for worker in self._workers]
            given_up = [worker.served for worker in self._workers]
            try:
                await asyncio.wait([*waits, *given_up], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if all(served.done() for served in given_up):
                await given_up[0]


@asynccontextmanager
async def open_pools(
    specs: Sequence[EnvironmentSpec], *, num_workers: int, log_dir: Path | None, limits: PoolLimits | None = None
) -> AsyncIterator[dict[str, EnvPool]]:
    """Start `num_workers` for each environment and hand out the pools by label when all are ready; then end them.

    What workers write goes to a file each in `log_dir`; None: nowhere.
    Raises: EnvironmentSetupError with the reason when an environment cannot be loaded.
    """
    limits = limits or PoolLimits()
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
    pools: dict[str, EnvPool] = {}
    started = time.monotonic()
    try:
        for spec in specs:
            logs = [_log_file(log_dir, spec.label, index) for index in range(num_workers)]
            pools[spec.label] = EnvPool(spec, [_Worker(spec, limits, log) for log in logs])
        for pool in pools.values():
            await pool.wait_live()
            _logger.info(
                "Environment %s: %d training and %d evaluation examples, workers ready after %.1f s",
                pool.label, pool.size.num_train, pool.size.num_eval, time.monotonic() - started,
            )  # fmt: skip
        yield pools
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))


def _log_file(log_dir: Path | None, label: str, index: int) -> Path:
    return Path(os.devnull) if log_dir is None else log_dir / f"{label.replace(os.sep, '_')}-{index}.log"


class _Worker:
    """One place in a pool: the process in it, its successors, and the rollouts it holds."""

    def __init__(self, spec: EnvironmentSpec, limits: PoolLimits, log: Path) -> None:
        self.ready: WorkerReady | None = None
        self.became_live = asyncio.Event()
        self.num_restarts = 0
        self._spec = spec
        self._limits = limits
        self._log = log
        self._frames: Frames | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, tuple[RolloutRequest, asyncio.Future[Rollout]]] = {}
        self._deaths_in_a_row = 0
        self._avoided: frozenset[str] = frozenset()
        self.served = asyncio.create_task(self._serve(), name=f"worker of {spec.label}")

    @property
    def is_live(self) -> bool:
        return self.became_live.is_set()

    @property
    def load(self) -> int:
        return len(self._pending)

    async def wait_live(self) -> None:
        """Until the first process is ready. Raises: EnvironmentSetupError."""
        live = asyncio.ensure_future(self.became_live.wait())
        try:
            await asyncio.wait([live, self.served], return_when=asyncio.FIRST_COMPLETED)
            if self.served.done():
                await self.served
        finally:
            live.cancel()

    async def run(self, request: RolloutRequest, *, wire_id: int) -> Rollout:
        """Run one rollout in the live process; `wire_id` is unique in the pool."""
        assert self._frames is not None
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._pending[wire_id] = (request, future)
        self._frames.send(_with_id(request, wire_id))
        try:
            return await asyncio.wait_for(future, request.timeout_s + self._limits.grace_s)
        except TimeoutError:
            _logger.warning("Environment %s: a worker does not answer; killing it", self._spec.label)
            self._kill()
            message = f"took longer than {request.timeout_s:g} s and blocked its worker"
            return failed(request, self._spec.label, Failure(kind=FailureKind.TIMEOUT, message=message))
        except asyncio.CancelledError:
            if self._frames is not None:
                self._frames.send(CancelRollout(id=wire_id))
            raise
        finally:
            self._pending.pop(wire_id, None)

    def avoid(self, servers: frozenset[str]) -> None:
        """Send nothing to these servers."""
        self._avoided = servers
        if self.is_live and self._frames is not None:
            self._frames.send(AvoidServers(servers=servers))

    async def close(self) -> None:
        """End the process: by closing its socket, then by force."""
        self.served.cancel()
        await asyncio.gather(self.served, return_exceptions=True)

    async def _serve(self) -> None:
        """One process after the other, until cancelled. Raises: EnvironmentSetupError when it is given up."""
        while True:
            reason = await self._serve_one()
            self._deaths_in_a_row += 1
            if 0 <= self._limits.max_restarts < self._deaths_in_a_row:
                raise EnvironmentSetupError(
                    f"environment {self._spec.label!r}: a worker {reason}, {self._deaths_in_a_row} times in a row; "
                    f"{self._where_to_look}"
                )
            self.num_restarts += 1
            _logger.warning("Environment %s: a worker %s; starting another", self._spec.label, reason)

    async def _serve_one(self) -> str:
        """Start a process and serve it until it is gone. Returns how it ended."""
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as log, theirs:
            self._process = _spawn(theirs, log)
        self._frames = await Frames.over(ours)
        try:
            self._frames.send(self._spec)
            await self._handshake(self._frames)
            if self._avoided:
                self._frames.send(AvoidServers(servers=self._avoided))
            self.became_live.set()
            while (message := await self._frames.read()) is not None:
                if isinstance(message, Rollout):
                    self._finish(message)
            return f"ended with {_ending(await self._end())}"
        finally:
            self.became_live.clear()
            await self._end()
            self._fail_pending()

    async def _handshake(self, frames: Frames) -> None:
        try:
            answer = await asyncio.wait_for(frames.read(), self._limits.setup_s)
        except TimeoutError:
            raise EnvironmentSetupError(
                f"environment {self._spec.label!r} was not loaded within {self._limits.setup_s:g} s; "
                f"{self._where_to_look}"
            ) from None
        if isinstance(answer, WorkerRefused):
            raise EnvironmentSetupError(answer.message)
        if not isinstance(answer, WorkerReady):
            raise EnvironmentSetupError(
                f"environment {self._spec.label!r}: its worker ended with {_ending(await self._end())} while it "
                f"loaded; {self._where_to_look}"
            )
        self.ready = answer

    @property
    def _where_to_look(self) -> str:
        return "set log.env_worker_logs to see why" if self._log == Path(os.devnull) else f"see {self._log}"

    def _finish(self, rollout: Rollout) -> None:
        entry = self._pending.get(rollout.id)
        if entry is not None and not entry[1].done():
            request, future = entry
            self._deaths_in_a_row = 0
            future.set_result(_with_id(rollout, request.id))

    def _fail_pending(self) -> None:
        for request, future in self._pending.values():
            if not future.done():
                message = "the worker process ended while the rollout ran in it"
                failure = Failure(kind=FailureKind.WORKER_DIED, message=message)
                future.set_result(failed(request, self._spec.label, failure))

    async def _end(self) -> int:
        """Close the socket and wait for the process; kill it when it stays. Returns its exit code."""
        frames, self._frames = self._frames, None
        if frames is not None:
            await frames.close()
        assert self._process is not None
        # One that is still loading would see that its socket is closed only once it has loaded.
        kill_at = time.monotonic() + (self._limits.close_s if self.ready else 0.0)
        while (code := self._process.poll()) is None:
            if time.monotonic() >= kill_at:
                self._process.kill()
            await asyncio.sleep(POLL_S)
        return code

    def _kill(self) -> None:
        """End the process now; nothing more is given to it."""
        self.became_live.clear()
        if self._process is not None:
            self._process.kill()


def environment_spec(
    env: EnvConfig, *, client: ClientConfig, model: str, log: LogConfig, retry_s: float = 0.0
) -> EnvironmentSpec:
    """What workers of a configured environment need to know."""
    return EnvironmentSpec(
        id=env.id,
        label=env.label,
        args=env.args,
        api=env.api,
        base_urls=client.base_url,
        model=model,
        api_key_var=client.api_key_var,
        headers=client.headers,
        request_timeout_s=client.timeout,
        retry_s=retry_s,
        log_level=log.level,
        library_log_level=log.vf_level,
        logs_json=log.json_logging,
    )


def _spawn(connection: socket.socket, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a worker on its end of the socket. It watches this process and ends with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "prime_rl.environments.worker", "--fd", str(connection.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(connection.fileno(),),
        env=os.environ | {lifeline.VARIABLE: lifeline.launcher_token()},
        process_group=0,  # Ctrl-C at the terminal is for the orchestrator, which then ends its workers
    )


def _with_id(message: T, message_id: int) -> T:
    return msgspec.structs.replace(message, id=message_id)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
