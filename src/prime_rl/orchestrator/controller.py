"""How busy the servers are, and how many rollouts may be in flight because of it.

A controller decides on the bound after each look at the servers' /metrics. The one there is leaves it as configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from prime_rl.errors import InferenceError
from prime_rl.orchestrator.concurrency import Concurrency
from prime_rl.orchestrator.fleet import Fleet, State

LOOK_INTERVAL_S: Final = 5.0

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The newer name and the older one."""
_SAMPLE: Final = re.compile(
    rf"(?P<name>{'|'.join((RUNNING, WAITING, PREEMPTIONS, *KV_USAGE))})(\{{.*\}})?\s+(?P<value>\S+)(\s+\d+)?\s*$"
)
"""Name, labels, value and, where there is one, a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one server says of itself."""

    running: int
    """Requests that are decoding."""
    waiting: int
    """Requests that wait for room."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1: of the fullest engine."""
    preemptions: int
    """Requests that were put back to make room, since the server was started."""


class Controller(Protocol):
    """Decides how many rollouts may be in flight."""

    def bound(self, loads: Sequence[Load], current: int | None) -> int | None:
        """The bound from now on, given the servers that answered and the bound so far. None: no bound. One that has no
        room for what must run at once is raised until it has (`Concurrency.floor`)."""
        ...


class FixedBound:
    """The bound stays as it is."""

    def bound(self, loads: Sequence[Load], current: int | None) -> int | None:
        return current


class Loads:
    """The load of each server of a fleet, and what follows from it."""

    def __init__(
        self, fleet: Fleet, concurrency: Concurrency, controller: Controller, *, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when the bound has changed."""
        self._fleet = fleet
        self._concurrency = concurrency
        self._controller = controller
        self._on_change = on_change
        self._loads: list[Load] = []

    # Consumes: the servers' metrics. Waits for: the next look. Unblocked by: time, and the requests' deadline.
    async def watch(self) -> None:
        """Returns never."""
        while True:
            up = [server.client for server in self._fleet.servers if server.state is State.UP]
            answers = await asyncio.gather(*(client.metrics() for client in up), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, InferenceError):
                    raise answer
            self._loads = [parse_load(answer) for answer in answers if isinstance(answer, str)]
            bound = self._controller.bound(self._loads, self._concurrency.bound)
            if bound != self._concurrency.bound:
                self._concurrency.bound = bound
                self._on_change()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def metrics(self) -> dict[str, float]:
        """At the last look, over the servers that answered; nothing where none did."""
        if not self._loads:
            return {}
        bound = self._concurrency.bound
        return {
            "inference/requests_running": float(sum(load.running for load in self._loads)),
            "inference/requests_waiting": float(sum(load.waiting for load in self._loads)),
            "inference/kv_usage/max": max(load.kv_usage for load in self._loads),
            "inference/preemptions": float(sum(load.preemptions for load in self._loads)),
            **({} if bound is None else {"scheduler/max_in_flight": float(bound)}),
        }


def parse_load(exposition: str) -> Load:
    """From Prometheus' text format. What is not told, or not as a finite number of 0 or more, is 0.

    Example: 'vllm:num_requests_running{engine="0"} 3.0' -> Load(running=3, waiting=0, kv_usage=0.0, preemptions=0)
    """
    values: dict[str, list[float]] = {}
    for name, value in _samples(exposition.splitlines()):
        values.setdefault(name, []).append(value)
    usage = next((values[name] for name in KV_USAGE if name in values), [0.0])
    return Load(
        running=int(sum(values.get(RUNNING, ()))),
        waiting=int(sum(values.get(WAITING, ()))),
        kv_usage=max(usage),
        preemptions=int(sum(values.get(PREEMPTIONS, ()))),
    )


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    """Name and value of the lines that matter here; of an answer that was cut off, the last may not be whole."""
    for line in lines:
        if (found := _SAMPLE.match(line)) is not None:
            with contextlib.suppress(ValueError):
                if 0 <= (value := float(found["value"])) < math.inf:
                    yield found["name"], value
