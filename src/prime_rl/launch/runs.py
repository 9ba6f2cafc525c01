"""How `rl` begins in a run directory.

    what is there                    without resume_step    with it
    nothing                          begins                 refused: there is no checkpoint
    a run that is not complete and   goes on                goes back to the checkpoint; goes on, where the same command
    was supervised                                          did that before and was killed, or ended by SIGTERM
    any other run                    refused                goes back to the checkpoint
    nothing, and checkpoints in      refused, with `clean`  goes back to the checkpoint
    `ckpt.output_dir`                too

Going on asks for the same configuration, but for what changes nothing that is trained (`HARMLESS`). With `clean`,
whatever is there is deleted first. One launcher at a time works in a directory; what one that was killed has left
running is waited for.
"""

import fcntl
import os
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel

from prime_rl import lifeline
from prime_rl.config.artifacts import (
    OrchestratorCheckpointConfig,
    SharedCheckpointConfig,
    TrainerCheckpointConfig,
)
from prime_rl.config.optim import ConstantSchedulerConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.writing import to_toml
from prime_rl.errors import ConfigError, DataError
from prime_rl.journal import Entry, Journal, read_journal
from prime_rl.launch.machine import ProcessSpec
from prime_rl.launch.processes import is_there, kill, marked
from prime_rl.launch.servers import check_ports
from prime_rl.launch.supervise import over_files, recovering
from prime_rl.paths import RunPaths, check_run_dir, claim_run_dir, found_results, step_dir
from prime_rl.resume import go_back, sources
from prime_rl.transport.checkpoints import choose, complete_checkpoints, remove_lost, step_of
from prime_rl.transport.manifest import remove_dir

LEFTOVER_S: Final = 30.0
"""Seconds in which what a killed launcher has left ends by itself; then it is killed. Nothing is lost by that."""
LEFTOVER_POLL_S: Final = 0.1

INTERRUPTED: Final = "Ctrl-C"
"""Reason of `run_stopped` where a person ended the launcher."""
TERMINATED: Final = "SIGTERM"
"""Reason of `run_stopped` where a queue did, which gives the same command again."""

_SERVER = ("log", "server", "gpu_memory_utilization", "max_num_seqs")

HARMLESS: Final = (
    *("supervise", "max_restarts", "recovery_interval", "hang_timeout", "log", "wandb", "output_dir"),
    *("ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval", "ckpt.save_async", "ckpt.resume_step"),
    *("trainer.log", "trainer.wandb", "trainer.heartbeat", "trainer.weights", "trainer.keep_batches"),
    *("trainer.batch_timeout", "trainer.dist_timeout_seconds", "trainer.max_skipped_steps"),
    *("orchestrator.log", "orchestrator.wandb", "orchestrator.heartbeat", "orchestrator.max_traces_gb"),
    *("orchestrator.client", "orchestrator.teacher_model.client", "orchestrator.max_concurrent"),
    *("orchestrator.rollout_timeout", "orchestrator.weights_timeout", "orchestrator.outage_timeout"),
    *("orchestrator.env_setup_timeout", "orchestrator.ckpt.wait_for_weights_timeout"),
    *(f"{server}.{key}" for server in ("inference", "teacher_inference") for key in _SERVER),
)
"""Keys and sections in which the command that goes on may differ from the one that began, besides `max_steps`, which
may grow under a constant learning rate. Docs/failures.md lists them."""

_CHECKPOINTS: Final = {
    "ckpt": SharedCheckpointConfig,
    "trainer.ckpt": TrainerCheckpointConfig,
    "orchestrator.ckpt": OrchestratorCheckpointConfig,
}
"""Sections that say nothing of what is trained where they hold their defaults: they may be added."""


class Beginning(StrEnum):
    """How a launcher begins."""

    NEW = "new"
    GOES_ON = "goes_on"
    """From the newest that the run directory holds."""
    GOES_BACK = "goes_back"
    """To the checkpoint that `resume_step` names."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a launcher begins, and with which checkpoint."""

    beginning: Beginning
    step: int | None = None
    """Of the checkpoint, where it goes back to one."""


@contextmanager
def held(paths: RunPaths) -> Iterator[None]:
    """Be the only launcher that works in this directory. Raises: ConfigError where another one does."""
    try:
        paths.output_dir.mkdir(parents=True, exist_ok=True)
        file = paths.lock.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{paths.output_dir} cannot be written: {error.strerror or error}; choose another directory with "
            "--output-dir"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"another rl ({file.read().strip() or 'which just started'}) works in {paths.output_dir}; end that "
                "one, or choose another directory with --output-dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def decide(config: RLConfig, paths: RunPaths) -> Decision:
    """How to begin, from a look at the run directory.

    Raises: ConfigError where it holds a run that this command is not to touch; ArtifactError where there is no sound
    checkpoint of `resume_step`.
    """
    resume_step = config.ckpt.resume_step if config.ckpt is not None else None
    if config.clean:
        if resume_step is not None:
            raise ConfigError("--clean deletes what ckpt.resume_step goes on from; leave one of them out")
        _check_checkpoints(config, paths)
        return Decision(Beginning.NEW)
    entries = read_journal(paths.journal)
    recorded = _recorded(paths)
    is_unfinished = config.supervise and recorded is not None and _is_unfinished(entries)
    has_results = bool(found_results(paths.output_dir))
    # Of a run that counts anew all is set aside until its first weights: it goes on from its checkpoint.
    is_there = has_results or (resume_step is None and _resumed_from(entries) is not None)
    if is_unfinished and recorded is not None and is_there:
        if resume_step is None:
            _check_same(config, recorded, paths)
            return Decision(Beginning.GOES_ON)
        is_again = resume_step == recorded.get("ckpt.resume_step") and not _differences(config, recorded)
        if is_again and _was_cut_off(entries):
            return Decision(Beginning.GOES_ON)
    if resume_step is not None:
        ckpt = config.ckpt
        assert ckpt is not None
        roots = sources(paths, ckpt.output_dir, resume_step, counts_anew=ckpt.skip_progress)
        return Decision(Beginning.GOES_BACK, step_of(choose(roots, resume_step)))
    check_run_dir(paths.output_dir, clean=False)
    _check_checkpoints(config, paths)
    if aside := sorted(path.name for path in paths.superseded.glob("[0-9]*")):
        raise ConfigError(
            f"{paths.output_dir} holds a run of which all was set aside (superseded/{aside[-1]}); go back to a "
            "checkpoint of it with --ckpt.resume-step and --ckpt.skip-progress, choose another directory with "
            "--output-dir, or delete it with --clean"
        )
    return Decision(Beginning.NEW)


def enter(config: RLConfig, specs: Sequence[ProcessSpec], paths: RunPaths) -> tuple[Decision, list[ProcessSpec]]:
    """Make the run directory ours, as its lock already is; how the run begins, and with which processes.

    Raises: as `decide`, and ConfigError where a port is taken; nothing was deleted then.
    """
    try:
        entries = read_journal(paths.journal)
    except DataError:
        if not config.clean:
            raise
        entries = []
    end_leftovers(entries)
    decision = decide(config, paths)
    check_ports(specs)
    if decision.beginning is Beginning.NEW:
        claim_run_dir(paths.output_dir, clean=config.clean)
        entries = []
    else:
        for said in (paths.broadcasts, paths.activity):  # by processes that are gone
            shutil.rmtree(said, ignore_errors=True)
    if decision.step is not None:
        assert config.ckpt is not None
        go_back(paths, decision.step, checkpoints=config.ckpt.output_dir, counts_anew=config.ckpt.skip_progress)
    if decision.beginning is not Beginning.NEW:
        _remove_lost(paths, entries)
    Journal(paths.journal, "launcher").note(
        "run_started",
        step=decision.step,
        attempt=1 + sum(entry.event == "run_started" for entry in entries),
        beginning=decision.beginning,
        supervised=int(config.supervise),
        token=lifeline.launcher_token(),
        host=socket.gethostname(),
        boot=lifeline.boot_id(),
    )
    step = decision.step if decision.step is not None else _resumed_from(entries)
    return decision, [replace(spec, config=spec.config and _begun(spec.config, decision, step)) for spec in specs]


def finish(paths: RunPaths) -> None:
    """The run is complete, and nothing is to be recovered any more; unless the disk did not take the word of that."""
    Journal(paths.journal, "launcher").note("run_complete")
    try:
        is_noted = not _is_unfinished(read_journal(paths.journal))
    except DataError:  # with a line that says nothing, the next launcher asks for help before anything else
        is_noted = False
    if is_noted:
        for step in complete_checkpoints(paths.recovery):
            remove_dir(step_dir(paths.recovery, step))  # whoever is killed here leaves none that is half there
        shutil.rmtree(paths.recovery, ignore_errors=True)


def _remove_lost(paths: RunPaths, entries: Sequence[Entry]) -> None:
    """Weights that are soon removed again are not forced to disk: what a crash of the machine cut is made again.

    As long as the machine is up, whatever was killed, what was written is there, and need not be read.
    """
    boots = [entry.facts.get("boot") for entry in entries if entry.event == "run_started"]
    if lifeline.boot_id() and boots and boots[-1] == lifeline.boot_id():
        return
    for step in remove_lost(paths.weights):
        print(
            f"rl: weights {step} were not all on disk when the machine went down; they are removed, and come again "
            "when their step is trained again",
            file=sys.stderr,
        )


def end_leftovers(entries: Sequence[Entry]) -> None:
    """Wait for what earlier launchers have left running on this machine; after LEFTOVER_S, end it."""
    here = socket.gethostname()
    started = [entry.facts for entry in entries if entry.event == "run_started" and entry.facts.get("host") == here]
    tokens = [f"{facts['token']}/" for facts in started if not lifeline.is_alive(str(facts["token"]))]
    end = time.monotonic() + LEFTOVER_S
    is_told = False
    while tokens and (left := marked(tokens, by_prefix=True)):
        if not is_told:
            is_told = True
            number = f"{len(left)} process{'es' if len(left) > 1 else ''}"
            print(f"rl: waiting for what a launcher that was killed has left running ({number})", file=sys.stderr)
        while any(map(is_there, left)) and time.monotonic() < end:
            time.sleep(LEFTOVER_POLL_S)
        if time.monotonic() >= end:
            kill(left)
            time.sleep(LEFTOVER_POLL_S)


def _check_checkpoints(config: RLConfig, paths: RunPaths) -> None:
    """A new run would go on from checkpoints that lie where it keeps its own, and remove those that are old.

    `clean` does not delete them: who made them cannot be told. Raises: ConfigError naming them.
    """
    root = config.ckpt.output_dir if config.ckpt is not None else None
    if root is None or root.absolute() == paths.checkpoints.absolute():  # what is there is seen to with the rest
        return
    if steps := complete_checkpoints(root):
        there = (
            f"holds checkpoints of an earlier run (up to step {steps[-1]}), which --clean does not delete; go on from "
            f"the latest with --ckpt.resume-step {steps[-1]}, choose another ckpt.output_dir, or move them away"
        )
    elif aside := sorted(step.parent.name for step in root.glob("superseded/[0-9]*/step_*")):
        there = (
            f"holds in superseded/{aside[-1]} what an earlier run has set aside; choose another ckpt.output_dir, or "
            "move it away"
        )
    else:
        return
    raise ConfigError(f"ckpt.output_dir = {root} {there}")


def _begun(config: BaseModel, decision: Decision, resume_step: int | None) -> BaseModel:
    """The configuration of a process of a run that begins so; `resume_step`: of the checkpoint it once went back to."""
    checkpoints = getattr(config, "ckpt", None)
    if checkpoints is not None and "recover" in type(config).model_fields:
        resuming = checkpoints.model_copy(update={"resume_step": resume_step})
        config = config.model_copy(update={"ckpt": resuming})
    return over_files(recovering(config)) if decision.beginning is Beginning.GOES_ON else config


def _resumed_from(entries: Sequence[Entry]) -> int | None:
    """The step of the checkpoint that the run went back to last; None: it never did."""
    for entry in reversed(entries):
        if entry.event == "run_started" and (entry.step is not None or entry.facts.get("beginning") == Beginning.NEW):
            return entry.step
    return None


def _is_unfinished(entries: Sequence[Entry]) -> bool:
    """Whether the last launcher supervised a run and did not see it complete."""
    ends = [entry for entry in entries if entry.event in ("run_started", "run_complete")]
    return bool(ends) and ends[-1].event == "run_started" and ends[-1].facts.get("supervised") == 1


def _was_cut_off(entries: Sequence[Entry]) -> bool:
    """Whether the last launcher was ended by something outside the run and by nobody at a keyboard."""
    ends = [entry for entry in entries if entry.event in ("run_started", "run_stopped")]
    return bool(ends) and (ends[-1].event == "run_started" or ends[-1].facts.get("reason") == TERMINATED)


def _recorded(paths: RunPaths) -> dict[str, Any] | None:
    """Key -> value of the configuration that the run in the directory was started with; None: it cannot be told."""
    try:
        return _flat(tomllib.loads(paths.config("rl").read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError):
        return None


def _flat(tree: Mapping[str, Any], around: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{around}{key}.")
        else:
            flat[f"{around}{key}"] = None if value == "None" else value
    return flat


def _check_same(config: RLConfig, recorded: dict[str, Any], paths: RunPaths) -> None:
    """Raises: ConfigError naming the keys in which `config` differs from the one that the run was started with."""
    if told := _differences(config, recorded):
        raise ConfigError(
            f"{paths.output_dir} holds a run that is not complete, and the same command goes on with it; but "
            f"{'; '.join(told)}. Give it as it was ({paths.config('rl')}), go back to a checkpoint with "
            "--ckpt.resume-step, choose another directory with --output-dir, or delete that run with --clean"
        )


def _differences(config: RLConfig, recorded: dict[str, Any]) -> list[str]:
    """What `config` has changed of what matters: `seed is 2 and was 1`."""
    given = _flat(tomllib.loads(to_toml(config)))
    before = _defaults_of_checkpoints(given, recorded) | recorded
    told = []
    for key in sorted({*given, *before}):
        now, then = given.get(key), before.get(key)
        if now == then or any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS):
            continue
        if key != "max_steps" or not _has_grown(now, then):
            told.append(f"{key} is {now!r} and was {then!r}")
        elif not isinstance(config.trainer.scheduler, ConstantSchedulerConfig):
            told.append(f"{key} is {now!r} and was {then!r}, on which the learning rates of trainer.scheduler depend")
    return told


def _defaults_of_checkpoints(given: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """What the sections of `_CHECKPOINTS` that only `given` has would have been, by key."""
    filled: dict[str, Any] = {}
    for section, model in _CHECKPOINTS.items():
        if not any(key.startswith(f"{section}.") for key in recorded):
            defaults = _flat(tomllib.loads(to_toml(model())), f"{section}.")
            filled |= {key: value for key, value in defaults.items() if key in given}
    return filled


def _has_grown(now: int | None, before: int | None) -> bool:
    """Of `max_steps`; None is without end."""
    return now is None or (before is not None and now >= before)
