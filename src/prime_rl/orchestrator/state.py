"""All that an orchestrator must know to go on after a batch as if nothing had happened, and its form on disk. Pure.

It is taken at the moment when batch n is, and lies beside it (`rollouts/step_n/state.msgpack`), so that `next_batch` is
n + 1: what went into batch n is in it no more, and what was drawn, generated or judged for later ones is. What it does
not hold follows from the configuration and the seed, or is of the process alone, such as connections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Generic

import msgspec

from prime_rl.data.samples import TrainingSample
from prime_rl.environments.frames import SentRollout, restored, shortened
from prime_rl.environments.rollouts import Rollout
from prime_rl.errors import DataError
from prime_rl.orchestrator.buffer import BufferState
from prime_rl.orchestrator.faults import Judged
from prime_rl.orchestrator.groups import End, GroupState, Result, SchedulerState, Scored
from prime_rl.orchestrator.metrics import Progress
from prime_rl.orchestrator.scoring import ScoredRollout
from prime_rl.transport.batches import decode_array, encode_array

FORMAT: Final = 1


class EvaluationState(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of evaluations during training so far. What was evaluated, `evaluated` tells."""

    dispatched: int
    ends: list[tuple[End, int]]


class State(msgspec.Struct, Generic[Result, Scored], frozen=True, kw_only=True):
    """The state; `OrchestratorState` in memory, and with rollouts as they are sent in a file."""

    format: int = FORMAT
    rollouts_per_example: int
    in_tokens: bool
    """Whether sizes of groups are in tokens."""
    scheduler: SchedulerState[Result, Scored]
    buffer: BufferState
    progress: Progress
    faults: dict[str, list[Judged]]
    """By environment."""
    evaluation: EvaluationState | None
    num_failovers: int
    num_restarts: int
    """Of inference servers."""

    @property
    def next_batch(self) -> int:
        """The batch that comes next."""
        return self.scheduler.next_batch


OrchestratorState = State[Rollout, ScoredRollout]


class _Score(msgspec.Struct, frozen=True, kw_only=True):
    """A `ScoredRollout` without its rollout, which lies beside it."""

    advantage: float
    samples: list[TrainingSample]
    detected: tuple[str, ...]
    filtered_by: str


class _Format(msgspec.Struct):
    format: int


def encode(state: OrchestratorState) -> bytes:
    """As it lies on disk. For a thread: rollouts are encoded one by one, so that others get their turn in between."""
    groups = [
        _with(
            group,
            results=[(dispatch, _raw(shortened(result))) for dispatch, result in group.results],
            scored=None if group.scored is None else [_raw(_score(scored)) for scored in group.scored],
        )
        for group in state.scheduler.groups
    ]
    packed = _with(state, scheduler=_with(state.scheduler, groups=groups))
    return msgspec.msgpack.encode(packed, enc_hook=encode_array)


def decode(content: bytes) -> OrchestratorState:
    """Raises: DataError where it is no state, or one of another version of prime-rl."""
    try:
        found = msgspec.msgpack.decode(content, type=_Format).format
        if found == FORMAT:
            packed = msgspec.msgpack.decode(content, type=State[SentRollout, _Score], dec_hook=decode_array)
            groups = [_unpacked(group) for group in packed.scheduler.groups]
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"it is no state of an orchestrator: {error}") from error
    if found != FORMAT:
        raise DataError(f"it has format {found}; this version of prime-rl reads format {FORMAT}")
    state: OrchestratorState = _with(packed, scheduler=_with(packed.scheduler, groups=groups))
    return state


def _with(value: Any, **fields: Any) -> Any:
    """`value` with fields that may be of other types."""
    return msgspec.structs.replace(value, **fields) if isinstance(value, msgspec.Struct) else replace(value, **fields)


def _raw(value: SentRollout | _Score) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=encode_array))


def _score(scored: ScoredRollout) -> _Score:
    return _Score(
        advantage=scored.advantage, samples=scored.samples, detected=scored.detected, filtered_by=scored.filtered_by
    )


def _unpacked(group: GroupState[SentRollout, _Score]) -> GroupState[Rollout, ScoredRollout]:
    results = [(dispatch, restored(sent)) for dispatch, sent in group.results]
    scored = None
    if group.scored is not None:
        scored = [
            ScoredRollout(
                rollout=rollout,
                advantage=score.advantage,
                samples=score.samples,
                detected=score.detected,
                filtered_by=score.filtered_by,
            )
            for (_, rollout), score in zip(results, group.scored, strict=True)
        ]
    whole: GroupState[Rollout, ScoredRollout] = _with(group, results=results, scored=scored)
    return whole
