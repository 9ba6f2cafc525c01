"""What of a state is of use to a run that is resumed with other data, other groups, or as if at its start. Pure.

A group that is of no use is cancelled, as if it had never been complete; its example is drawn again where it is still
there, else another of its environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from prime_rl.orchestrator.buffer import UNKNOWN, BufferState, PoolState
from prime_rl.orchestrator.groups import End, Example, GroupState
from prime_rl.orchestrator.metrics import Progress
from prime_rl.orchestrator.state import OrchestratorState

Recognise = Callable[[Example, int], Example | None]
"""Where an example with a fingerprint is now; None: nowhere."""


def knows_examples(state: OrchestratorState) -> frozenset[str]:
    """The environments of which the state holds something about single examples, by which they are recognised."""
    aside = (env for env, pool in state.buffer.pools.items() if pool.aside)
    return frozenset([*aside, *(group.example.env for group in state.scheduler.groups)])


def with_data(
    state: OrchestratorState, num_examples: Mapping[str, int], fingerprints: Mapping[str, Sequence[int]]
) -> OrchestratorState:
    """For the training examples that there are now, by environment.

    `fingerprints`: () where examples are the same as before if there are as many.
    """
    pools = dict(state.buffer.pools)
    recognised: dict[str, Recognise] = {}
    for env, number in num_examples.items():
        prints = fingerprints.get(env, ())
        if env in pools and not _is_same(state, env, number, prints):
            recognised[env] = recognise = _Index(env, prints).find
            pools[env] = _moved(env, pools[env], recognise)
    if not recognised and num_examples.keys() >= pools.keys():
        return state

    def find(example: Example, fingerprint: int) -> Example | None:
        if example.env not in num_examples:
            return None
        return recognised[example.env](example, fingerprint) if example.env in recognised else example

    buffer = replace(state.buffer, pools={env: pool for env, pool in pools.items() if env in num_examples})
    return _with_groups(msgspec.structs.replace(state, buffer=buffer), find, "data_changed")


def without_groups(state: OrchestratorState, why: str) -> OrchestratorState:
    """Nothing that was generated is kept; the examples are drawn again first."""
    return _with_groups(state, lambda example, _: example, why, keeps=lambda group: False)


def without_buffer(state: OrchestratorState) -> OrchestratorState:
    """Nothing that was generated is kept, and examples are drawn as at the start of a run."""
    state = without_groups(state, "skip_buffer")
    anew = BufferState(pools={}, weights={}, drawn={}, owed=[], filtered={}, num_returns=0)
    return msgspec.structs.replace(state, scheduler=replace(state.scheduler, again=[]), buffer=anew)


def from_the_start(state: OrchestratorState) -> OrchestratorState:
    """As of a run at batch 0, which knows of its examples what `state` knows."""
    scheduler = without_groups(state, "").scheduler
    counts = dict.fromkeys(scheduler.counts, 0)
    scheduler = replace(scheduler, version=0, next_batch=0, counts=counts, ends=[])
    return msgspec.structs.replace(
        state, scheduler=scheduler, progress=Progress(), evaluation=None, num_failovers=0, num_restarts=0
    )


class _Index:
    """Finds the examples of one environment by their fingerprints; of equal ones, each once."""

    def __init__(self, env: str, fingerprints: Sequence[int]) -> None:
        self._env = env
        self._places: dict[int, list[int]] = {}
        for index, fingerprint in reversed(list(enumerate(fingerprints))):
            self._places.setdefault(fingerprint, []).append(index)
        self._taken: dict[tuple[int, int], int] = {}

    def find(self, example: Example, fingerprint: int) -> Example | None:
        known = (example.index, fingerprint)
        if known not in self._taken and self._places.get(fingerprint) and fingerprint != UNKNOWN:
            self._taken[known] = self._places[fingerprint].pop()
        index = self._taken.get(known)
        return None if index is None else Example(env=self._env, index=index)


def _is_same(state: OrchestratorState, env: str, number: int, fingerprints: Sequence[int]) -> bool:
    """Whether the examples are those of before, as far as that was noted."""
    pool = state.buffer.pools[env]
    if number != pool.num_examples or not fingerprints:
        return number == pool.num_examples
    noted = [(index, fingerprint) for index, (_, fingerprint) in pool.aside.items()]
    noted += [
        (group.example.index, _fingerprint(group)) for group in state.scheduler.groups if group.example.env == env
    ]
    return all(fingerprint in (UNKNOWN, fingerprints[index]) for index, fingerprint in noted)


def _moved(env: str, pool: PoolState, recognise: Recognise) -> PoolState:
    found = [(recognise(Example(env=env, index=index), known[1]), known) for index, known in pool.aside.items()]
    aside = {example.index: known for example, known in found if example is not None}
    return replace(pool, aside=aside, num_examples=0, position=0)  # of another number: a new epoch begins


def _with_groups(
    state: OrchestratorState,
    recognise: Recognise,
    why: str,
    *,
    keeps: Callable[[GroupState[Any, Any]], bool] = lambda group: True,
) -> OrchestratorState:
    scheduler, owed = state.scheduler, list(state.buffer.owed)
    groups: list[GroupState[Any, Any]] = []
    again: list[Example] = []
    num_lost = 0
    wanted = [(example, UNKNOWN) for example in scheduler.again]
    for group in scheduler.groups:
        found = recognise(group.example, _fingerprint(group))
        if found is not None and keeps(group):
            groups.append(replace(group, example=found))
        else:
            num_lost += len(group.results) + len(group.in_flight)
            wanted.append((group.example, _fingerprint(group)))
    for example, fingerprint in wanted:
        if (found := recognise(example, fingerprint)) is not None:
            again.append(found)
        else:
            owed.append(example.env)
    ends = Counter(dict(scheduler.ends))
    if num_lost:
        ends[End(kind="cancelled", why=why)] += num_lost
    scheduler = replace(scheduler, groups=groups, again=again, ends=list(ends.items()))
    return msgspec.structs.replace(state, scheduler=scheduler, buffer=replace(state.buffer, owed=owed))


def _fingerprint(group: GroupState[Any, Any]) -> int:
    return next((result.fingerprint for _, result in group.results), UNKNOWN)
