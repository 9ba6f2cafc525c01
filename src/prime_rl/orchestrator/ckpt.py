"""Where an orchestrator begins, and with which state. The state is written with every batch; checkpoints hold copies.

    anew       batch 0, nothing before it
    resumed    `ckpt.resume_step`: batch N, with checkpoints/step_N/orchestrator/state.msgpack; what lies beyond it is
               set aside (`prime_rl.resume`)
    recovered  `recover`: after the newest complete rollouts/step_n, with the state beside it; where there is none, as
               if resumed from the newest checkpoint; else at batch 0. Of a run that was resumed, and has made no batch
               since, the beginning is that of `resumed` once more

A batch that is complete is never made again, and none that is not complete is ever seen by the trainer. So whenever the
process is killed, what it was about to do for the next batch is lost, and done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.errors import ArtifactError, ConfigError, DataError
from prime_rl.logs import get_logger
from prime_rl.orchestrator.adapting import from_the_start, knows_examples, with_data, without_buffer, without_groups
from prime_rl.orchestrator.evaluated import cut_off, evaluated_versions
from prime_rl.orchestrator.state import OrchestratorState, decode
from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import drop_rows, go_back, sources
from prime_rl.transport.batches import STATE
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE, choose, newest_sound, step_of
from prime_rl.transport.manifest import complete_steps, read_manifest, read_verified, remove_drafts

OWNS: Final = ("orchestrator",)
"""What going back to an earlier step sets aside here; the trainer does it for its own."""

_logger = get_logger(__name__)


class Begins(StrEnum):
    """How an orchestrator begins."""

    ANEW = "anew"
    RESUMED = "resumed"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an orchestrator begins."""

    how: Begins = Begins.ANEW
    next_batch: int = 0
    state: OrchestratorState | None = None
    """None: nothing is known of what was before."""
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """By kind of evaluation, the version that was evaluated last."""
    cut_off: int | None = None
    """The version whose evaluation the end of the process cut off."""

    def ended(self) -> Callable[[int], bool]:
        """Tells of a rollout id whether it is of a rollout that had ended in what goes on; others are given anew.

        Example: of 7 rollouts, 5 and 6 were in flight: True for 0 to 4.
        """
        if self.state is None:
            return lambda rollout_id: self.how is Begins.RESUMED
        scheduler = self.state.scheduler
        open_ = {dispatch.rollout_id for group in scheduler.groups for dispatch in group.in_flight}
        open_ |= {dispatch.rollout_id for group in scheduler.groups for dispatch, _ in group.results}
        return lambda rollout_id: rollout_id < scheduler.counts["dispatched"] and rollout_id not in open_

    @property
    def tells_examples(self) -> frozenset[str]:
        """Environments whose examples are to be recognised: their data may have been changed since."""
        is_resumed = self.how is Begins.RESUMED and self.state is not None
        return knows_examples(self.state) if is_resumed and self.state is not None else frozenset()

    def fitting(self, sizes: Mapping[str, int], fingerprints: Mapping[str, Sequence[int]]) -> OrchestratorState | None:
        """The state for the training examples that there are, by environment.

        `fingerprints`: of those in `tells_examples`. Raises: ConfigError where a run that was only interrupted is to go
        on with other data.
        """
        state = self.state
        if state is None or self.how is Begins.RESUMED:
            return None if state is None else with_data(state, sizes, fingerprints)
        before = {env: pool.num_examples for env, pool in state.buffer.pools.items()}
        if before != sizes:
            raise ConfigError(
                f"the run was interrupted with training examples {before}, and there are {dict(sizes)} now; give it "
                "the same data, or go on from a checkpoint (ckpt.resume_step), for which data may be changed"
            )
        return state


def prepare_start(config: OrchestratorConfig, paths: RunPaths) -> Start:
    """Where to begin, with the run directory in the shape for it. Waits for the disk.

    Raises: ArtifactError where batches of another run are there, or a checkpoint or state is missing or damaged;
        ConfigError where the run is beyond `max_steps`.
    """
    if config.bench:
        return Start()
    start = _recovered(config, paths) if config.recover else _resumed(config, paths)
    if start is None and (steps := complete_steps(paths.rollouts)):
        raise ArtifactError(
            f"{paths.rollouts} holds {len(steps)} batches of an earlier run; go on from one of its checkpoints "
            "(ckpt.resume_step), choose another output_dir or remove it"
        )
    if start is None:
        return Start()
    if config.max_steps is not None and start.next_batch > config.max_steps:
        raise ConfigError(f"the run is at step {start.next_batch} already, beyond max_steps = {config.max_steps}")
    for root in (paths.rollouts, paths.evals):
        remove_drafts(root)
    _logger.info("Going on with batch %d (%s)", start.next_batch, start.how)
    return _with_evaluations(start, config, paths)


def load_state(directory: Path, name: str) -> OrchestratorState:
    """The state in a published directory. Raises: ArtifactError naming the file that is damaged or missing."""
    try:
        return decode(read_verified(directory, name))
    except DataError as error:
        raise ArtifactError(f"{directory / name} cannot be used: {error}") from error


def _recovered(config: OrchestratorConfig, paths: RunPaths) -> Start:
    newest = max(complete_steps(paths.rollouts), default=None)
    if _is_to_resume_again(config, paths, newest) and (start := _resumed(config, paths)) is not None:
        return start
    if newest is not None and STATE in read_manifest(directory := step_dir(paths.rollouts, newest)).files:
        state = load_state(directory, STATE)
        return Start(how=Begins.RECOVERED, next_batch=newest + 1, state=_fitting(state, config))
    checkpoint = newest_sound([paths.recovery, _checkpoints(config, paths)])
    if checkpoint is None:
        return Start(how=Begins.RECOVERED)
    step = step_of(checkpoint)
    if newest is not None and newest >= step:
        raise ArtifactError(
            f"{step_dir(paths.rollouts, newest)} was written without {STATE}, so nothing is known of what comes after "
            f"it; go back to the checkpoint before it with ckpt.resume_step = {step}"
        )
    return Start(how=Begins.RECOVERED, next_batch=step, state=_of_checkpoint(checkpoint, config))


def _is_to_resume_again(config: OrchestratorConfig, paths: RunPaths, newest: int | None) -> bool:
    """Whether the run was resumed, and the process was killed before it had made a batch. `newest`: that is there."""
    settings = config.ckpt
    if settings is None or settings.resume_step is None:
        return False
    return newest is None or (newest < settings.resume_step and not settings.skip_progress)


def _resumed(config: OrchestratorConfig, paths: RunPaths) -> Start | None:
    """None: it is not asked for."""
    settings = config.ckpt
    if settings is None or settings.resume_step is None:
        return None
    roots = sources(paths, settings.output_dir, settings.resume_step, counts_anew=settings.skip_progress)
    checkpoint = choose(roots, settings.resume_step)
    step, state = step_of(checkpoint), _of_checkpoint(checkpoint, config)
    go_back(paths, step, owns=OWNS, checkpoints=settings.output_dir, counts_anew=settings.skip_progress)
    if settings.skip_progress:
        step, state = 0, None if state is None else from_the_start(state)
    if state is not None and settings.skip_buffer:
        state = without_buffer(state)
    return Start(how=Begins.RESUMED, next_batch=step, state=state)


def _with_evaluations(start: Start, config: OrchestratorConfig, paths: RunPaths) -> Start:
    """With what was evaluated; rows of metrics that come again are dropped."""
    step = start.next_batch
    if start.how is Begins.RECOVERED:
        drop_rows(paths.metrics("orchestrator"), step)
        evaluated, begun = evaluated_versions(paths), cut_off(paths)
        cut = next((begun[kind] for kind in ("eval", "val") if begun.get(kind, -1) > evaluated.get(kind, -1)), None)
        return replace(start, evaluated=evaluated, cut_off=cut)
    is_again = config.eval is not None and not config.eval.skip_eval_on_resume
    evaluated = evaluated_versions(paths, before=step if is_again else step + 1)
    if config.eval is not None and not is_again:
        evaluated["eval"] = step
    return replace(start, evaluated=evaluated)


def _checkpoints(config: OrchestratorConfig, paths: RunPaths) -> Path:
    """The root of the checkpoints."""
    own = None if config.ckpt is None else config.ckpt.output_dir
    return own or paths.checkpoints


def _of_checkpoint(checkpoint: Path, config: OrchestratorConfig) -> OrchestratorState | None:
    if ORCHESTRATOR_STATE not in read_manifest(checkpoint).files:
        _logger.warning(
            "%s holds no state of an orchestrator: examples are drawn as at the start, and totals begin anew",
            checkpoint,
        )
        return None
    return _fitting(load_state(checkpoint, ORCHESTRATOR_STATE), config)


def _fitting(state: OrchestratorState, config: OrchestratorConfig) -> OrchestratorState:
    """Groups that this configuration makes no batches of are generated anew."""
    shape = config.rollouts_per_example, config.token_batch_size is not None
    if (state.rollouts_per_example, state.in_tokens) == shape:
        return state
    _logger.warning("The size of groups or batches has changed: what was generated before is generated anew")
    first = float(config.rollouts_per_example * config.seq_len) if shape[1] else 1.0
    state = without_groups(state, "groups_changed")
    return msgspec.structs.replace(state, scheduler=replace(state.scheduler, estimate=first, num_sized=0))
