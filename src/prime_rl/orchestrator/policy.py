"""The weights that the servers serve: relays those that the trainer publishes, as files or from GPU to GPU.

    trainer -> weights/step_N (complete: it has its marker)  -> POST /update_weights to all servers -> `version`
            -> broadcasts/step_N (what it will send by NCCL) -> /pause, ready_N, /update_weights, /resume

A server answers with the digest of what it serves, which must be that of the marker. No torch in here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prime_rl import activity
from prime_rl.errors import DeadlineExceeded
from prime_rl.logs import get_logger
from prime_rl.orchestrator.broadcasts import Broadcasts
from prime_rl.orchestrator.fleet import Fleet, Target
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import MARKER, complete_steps, read_manifest

POLL_S: Final = 0.02
LIST_INTERVAL_S: Final = 1.0
"""Seconds between two looks at all steps. In between only the next one is looked for, which costs next to nothing."""

_logger = get_logger(__name__)


class Policy:
    """Which weights are served. `version` never goes back. `close` ends it."""

    def __init__(
        self, fleet: Fleet, weights: Path, *, broadcasts: Broadcasts | None = None, may_reload: bool = True
    ) -> None:
        """`may_reload`: servers with weights of another run are given those of this one."""
        self.fleet = fleet
        self.version = 0
        self.num_updates = 0
        self.update_s = 0.0
        """Seconds that the last update took."""
        self.newest_allowed: Callable[[], int | None] = lambda: None
        """The newest weights that may be served now (`strict_async_level`). None: any."""
        self._weights = weights
        self._broadcasts = broadcasts
        self._may_reload = may_reload
        self._listed_at = -LIST_INTERVAL_S

    async def start(self, ready_timeout: float, *, version: int = 0, adopt: bool = False, again: bool = False) -> None:
        """Wait for the servers, and begin with the weights of `version`, which are there: of 0, `weights/step_0` or
        the servers' own model. It is the only time that servers may be given older weights than they serve.

        `adopt`: with whatever they serve. `again`: this process takes the place of one that died, so that nobody would
        meet it to form an NCCL group. Raises: InferenceError.
        """
        target = None
        if not adopt:
            has_own = version or 0 in await asyncio.to_thread(complete_steps, self._weights)
            target = _target(step_dir(self._weights, version), version) if has_own else Target()
            self.version = version
        broadcasts = None if adopt else self._broadcasts
        if broadcasts is not None:
            await asyncio.to_thread(broadcasts.begin, again=again)
        over_nccl = broadcasts is not None and not broadcasts.is_over()
        await self.fleet.start(target, ready_timeout, may_reload=self._may_reload or again, wait_for_all=over_nccl)
        if broadcasts is not None and over_nccl:
            await broadcasts.open()

    async def newest(self, at_most: int | None) -> int:
        """The newest complete weights up to `at_most` (None: whichever); 0 where there are none."""
        steps = await asyncio.to_thread(complete_steps, self._weights)
        return max((step for step in steps if at_most is None or step <= at_most), default=0)

    async def appear(self, version: int, timeout: float) -> None:
        """Until the weights of `version` are complete. Raises: DeadlineExceeded after `timeout` seconds."""
        directory = step_dir(self._weights, version)
        with activity.waiting("trainer", f"{directory} to go on with", deadline_s=timeout) as waiting:
            while not (directory / MARKER).exists():
                if waiting.is_overdue:
                    raise DeadlineExceeded(
                        f"{directory}, which the run is to go on with, did not appear within {timeout:g} s; look at "
                        "the trainer's log, or raise weights_timeout (ckpt.wait_for_weights_timeout)"
                    )
                await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Nobody relays weights any more."""
        if self._broadcasts is not None:
            self._broadcasts.close()

    async def watch(self, on_update: Callable[[int], None]) -> None:
        """Relay new weights, newest first, and tell `on_update` their version. Returns never.

        Raises: InferenceError when every server refuses them.
        """
        while True:
            target = await asyncio.to_thread(self._next)
            if target is None:
                await asyncio.sleep(POLL_S)
                continue
            await self.load(target)
            on_update(target.version)

    async def load(self, target: Target) -> None:
        """Have the servers serve newer weights."""
        started = time.monotonic()
        if target.only_for is not None and self._broadcasts is not None:
            if not await self._broadcasts.relay(target):
                return
        else:
            await self.fleet.update(target)
        self.version = target.version
        self.num_updates += 1
        self.update_s = time.monotonic() - started
        _logger.debug("Serving weights %d after %.2f s", self.version, self.update_s)

    def _next(self) -> Target | None:
        return self._newest() or self._as_file()

    def _newest(self) -> Target | None:
        """The newest weights that are newer than those served; files where a step is there in both forms."""
        newest = self.newest_allowed()
        if newest is not None and newest <= self.version:
            return None
        roots = [self._weights]
        if self._broadcasts is not None and not self._broadcasts.is_over():
            roots.append(self._broadcasts.directory)
        is_due = time.monotonic() - self._listed_at >= LIST_INTERVAL_S
        if not is_due and not any((step_dir(root, self.version + 1) / MARKER).exists() for root in roots):
            return None
        self._listed_at = time.monotonic()
        steps = [
            (step, -place)
            for place, root in enumerate(roots)
            for step in complete_steps(root)
            if newest is None or step <= newest
        ]
        step, place = max(steps, default=(0, 0))
        return _target(step_dir(roots[-place], step), step) if step > self.version else None

    def _as_file(self) -> Target | None:
        """The weights that are served, where they were sent and are files since: whoever joins can read them."""
        directory = step_dir(self._weights, self.version)
        was_sent = self.fleet.target.only_for is not None
        return _target(directory, self.version) if was_sent and (directory / MARKER).exists() else None


def _target(directory: Path, version: int) -> Target:
    """Raises: ArtifactError when the directory is gone or its marker damaged."""
    published = read_manifest(directory).weights
    if published is None:
        return Target(version=version, directory=directory)
    only_for: frozenset[str] | None = frozenset() if published.kind == "nccl" else None
    return Target(version=version, directory=directory, digest=published.digest, only_for=only_for)
