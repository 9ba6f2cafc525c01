"""Watches the processes of a run and starts those again that died.

    process        ended with 0                ended otherwise, or was killed
    trainer, ...   is done                     starts again, and goes on from what the run directory holds (`recover`)
    service        as otherwise, until all     starts again; the orchestrator gives a server the newest weights before
                   others are done             it serves

Before anything is started again, nothing of its family runs, and its port is free. What no restart mends (a key that is
wrong, a model that is missing) has an exit code of its own, `errors.FINAL`, and ends the run; so does what `Restarts`
gives up. Of several servers that do the same work, one that is given up ends the run only with the last.

Without `restarts`, any death ends the run, but for that of one of several servers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel

from prime_rl import activity, lifeline
from prime_rl.config.artifacts import FilesystemBroadcastConfig, NCCLBroadcastConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import FINAL, ConfigError, DataError, ProcessFailed
from prime_rl.journal import Entry, Journal, read_journal
from prime_rl.launch import processes
from prime_rl.launch.hangs import Hangs
from prime_rl.launch.machine import ProcessSpec
from prime_rl.launch.processes import Running, end_family, how_it_ended, obituary, with_reason
from prime_rl.launch.restarts import Again, Restarts, place_of
from prime_rl.launch.servers import check_port
from prime_rl.logs import get_logger
from prime_rl.monitors.events import EventLog
from prime_rl.paths import RunPaths
from prime_rl.transport.broadcasts import fall_back

PORT_S = 60.0
"""Seconds in which the port of a server that died is free again."""

_logger = get_logger(__name__)


@dataclass(slots=True)
class _Member:
    """A process of the plan, through all its starts."""

    spec: ProcessSpec
    running: Running
    due: float | None = None
    """When it is started again, on the monotonic clock. None: it runs, is done, or was given up."""
    number: int = 0
    """Which restart that is."""
    is_over: bool = False
    """It has ended and is not started again."""
    hung: str | None = None
    """Why it was killed, where it was us."""


class Supervision:
    """The processes of one run: `start`, then `watch` until that is True, and `stop` in any case."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        paths: RunPaths,
        *,
        restarts: Restarts | None = None,
        journal: Journal | None = None,
        hangs: Hangs | None = None,
    ) -> None:
        """Without `journal`, nothing is noted; without `hangs`, a process that hangs is not seen to."""
        self._specs = specs
        self._paths = paths
        self._restarts = restarts
        self._journal = journal
        self._hangs = hangs
        self._members: list[_Member] = []

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run, by name."""
        return {one.spec.name: one.running.process.pid for one in self._members if one.running.code is None}

    @property
    def running(self) -> list[Running]:
        """The last start of each process, whether it still runs or not."""
        return [one.running for one in self._members]

    def start(self) -> None:
        """Start all processes, in the order of the plan."""
        for spec in self._specs:
            self._members.append(_Member(spec, self._started(spec)))

    def watch(self) -> bool:
        """Look once: start again what is due, and see what died; whether the run is complete.

        Raises: ProcessFailed when a process ended that is not started again.
        """
        self._look_for_hangs()
        died = [one for one in self._members if not one.is_over and one.due is None and one.running.code is not None]
        for one in [one for one in died if one.running.code == 0 and not one.spec.is_service]:
            one.is_over = True
            self._note_end(one, "done")
            died.remove(one)
        if all(one.is_over for one in self._members if not one.spec.is_service):
            return True
        for one in sorted(died, key=lambda one: one.running.code == 0):  # who failed says more than who just ended
            self._see_death(one)
        for one in self._members:
            if one.due is not None and time.monotonic() >= one.due:
                self._start_again(one)
        return False

    def hung(self, name: str, reason: str) -> None:
        """End the process `name`, which is past a deadline, with its whole family; `watch` then sees it dead.

        `reason` follows its name: "has not answered for 600 s".
        """
        for one in self._members:
            if one.spec.name == name and one.running.code is None:
                one.hung = reason
                end_family(one.running)

    def _look_for_hangs(self) -> None:
        reporting = {one.spec.name for one in self._members if one.spec.config is not None}
        running = {name: pid for name, pid in self.pids.items() if name in reporting}
        for hang in self._hangs.overdue(running) if self._hangs is not None else ():
            self._tell(f"{hang.culprit} {hang.reason}" if hang.culprit else hang.reason)
            if hang.culprit is not None and self._restarts is not None:
                self.hung(hang.culprit, hang.reason)

    def _see_death(self, one: _Member) -> None:
        how = f"{one.spec.name} {one.hung} and was ended" if one.hung else how_it_ended(one.running)
        self._note_end(one, how)
        left = self._verdict(one)
        if not isinstance(left, Again):
            one.is_over = True
            if self._is_survived(one):
                self._tell(f"{how}; the run goes on with the others; see {one.running.log}")
                return
            raise ProcessFailed(obituary(one.running, f"{how}{left}"))
        if members := end_family(one.running):
            pids = ", ".join(str(process.pid) for process in members)
            raise ProcessFailed(obituary(one.running, f"{how}, and what it started does not end (pid {pids})"))
        self._send_weights_as_files(one)
        one.due, one.number = time.monotonic() + left.wait_s, left.number
        why = with_reason(one.running, how)
        self._note("restart", name=one.spec.name, number=left.number, reason=why)
        self._tell(f"{why}; it is started again in {left.wait_s:g} s (restart {left.number}); see {one.running.log}")

    def _verdict(self, one: _Member) -> Again | str:
        """What becomes of a process that died; if it is not started again, what to say of that."""
        if self._restarts is None or one.running.code == FINAL:
            return ""
        place = place_of(self._entries(), one.spec.name)
        lived_s = time.monotonic() - one.running.since
        verdict = self._restarts.after_death(one.spec.name, lived_s=lived_s, place=place)
        return verdict if isinstance(verdict, Again) else f"; {verdict.reason}"

    def _entries(self) -> list[Entry]:
        """The journal; a damaged one is no reason to end a run that can go on."""
        try:
            return read_journal(self._paths.journal)
        except DataError as error:
            _logger.warning("%s", error)
            return []

    def _is_survived(self, one: _Member) -> bool:
        """Whether it is one of several servers that do the same work, and another one still does, or will."""
        others = [other for other in self._members if other is not one and other.spec.pool == one.spec.pool]
        return one.spec.is_service and bool(one.spec.pool) and any(not other.is_over for other in others)

    def _start_again(self, one: _Member) -> None:
        assert one.due is not None
        port = one.spec.port
        if port is not None and not _is_free(one.spec, port):
            if time.monotonic() >= one.due + PORT_S:
                raise ProcessFailed(
                    f"{one.spec.name} cannot be started again: its port {port} was not free within {PORT_S:g} s; "
                    "see what listens there (ss -ltnp), end it, and give the same command again"
                )
            return
        one.spec = replace(one.spec, config=one.spec.config and over_files(recovering(one.spec.config)))
        one.running = self._started(one.spec, one.number)
        one.due, one.hung = None, None

    def _send_weights_as_files(self, one: _Member) -> None:
        """A group of NCCL is not joined again: whoever had a part in it finds weights as files from now on."""
        if getattr(getattr(one.spec.config, "weight_broadcast", None), "type", "") == "nccl":
            fall_back(self._paths.broadcasts, f"{one.spec.name} died")

    def _started(self, spec: ProcessSpec, number: int = 0) -> Running:
        names = ",".join(one.name for one in self._specs)
        env = {} if self._restarts is None else {activity.SUPERVISED: names}
        running = processes.start(spec, self._paths.output_dir, number=number, env=env)
        pid = running.process.pid
        activity.child_started(spec.name, pid)
        self._note("process_started", name=spec.name, pid=pid, token=lifeline.token_of(pid) or "")
        return running

    def _note_end(self, one: _Member, how: str) -> None:
        activity.child_ended(one.spec.name)
        self._note("process_ended", name=one.spec.name, how=how)

    def _note(self, event: str, **facts: str | int) -> None:
        if self._journal is not None:
            self._journal.note(event, step=None, **facts)

    def _tell(self, event: str) -> None:
        _logger.warning("%s", event)
        with EventLog.opened(self._paths.events) as log:
            log.write(event)


def recovering(config: BaseModel) -> BaseModel:
    """The configuration of a process that goes on from what the run directory holds.

    `ckpt.resume_step` stays: as long as nothing was done since, a run that went back still begins at that checkpoint.
    """
    if "recover" not in type(config).model_fields:
        return config
    return config.model_copy(update={"recover": True})


def over_files(config: BaseModel) -> BaseModel:
    """The configuration of a process that takes, or gives, weights as files."""
    told: BaseModel
    if isinstance(config, InferenceConfig):
        told = config.weight_broadcast.model_copy(update={"type": "filesystem"})
    elif isinstance(getattr(config, "weight_broadcast", None), NCCLBroadcastConfig):
        told = FilesystemBroadcastConfig()
    else:
        return config
    return config.model_copy(update={"weight_broadcast": told})


def _is_free(spec: ProcessSpec, port: int) -> bool:
    """Whether its server could listen there; connections that just ended do not hinder it."""
    try:
        check_port(spec, port)
    except ConfigError:
        return False
    return True
