"""A real run of `rl` in which processes are killed (`kill -9`) at what the journal tells.

`KilledRun` reads `journal.jsonl` a thousand times a second. When the phase of the next kill is open, and the run has
got further since the last kill, the victim is killed at once. Afterwards the journal is read again: the kill counts
only where the phase had not ended by then, for then it had not when the victim was hit; else it is done again at
the next such phase. A launcher that was killed is followed by the same command once nothing of the run is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from prime_rl.journal import Entry, read_journal
from prime_rl.paths import RunPaths
from tests.chaos.phases import Phase, Victim, opened
from tests.chaos.victims import find, left_over
from tests.integration.conftest import MODEL, ROOT, command

POLL_S: Final = 0.001
LOOK_INTERVAL_S: Final = 0.2
"""Between two looks for the next victim, which take milliseconds; so that it is known when its phase begins."""
GONE_S: Final = 60.0
"""In which nothing is left of a run whose launcher is dead."""
TRIES: Final = 12
"""Of one kill; a phase of a small model is over in a few milliseconds."""
ENDING_S: Final = 30.0
NUM_EXAMPLES: Final = 1000
ENV: Final = "reverse-text"


@dataclass(frozen=True, slots=True)
class Kill:
    victim: Victim
    phase: Phase

    def __str__(self) -> str:
        return f"{self.victim} while {self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A kill that was fired."""

    victim: Victim
    phase: Phase
    pid: int
    step: int | None
    """Of the phase; None: it was starting."""
    line: int
    """Entries that the journal had when the victim was dead."""
    counts: bool
    """The phase had begun and not ended."""

    @property
    def kill(self) -> Kill:
        return Kill(self.victim, self.phase)


@dataclass(slots=True, kw_only=True)
class Ended:
    """How a run ended, and what had been done to it."""

    code: int
    seconds: float
    shots: list[Shot]
    left: list[str] = field(default_factory=list)
    """Processes that outlived their launcher, GONE_S after it was killed or at once when it had ended."""

    def save(self, directory: Path) -> None:
        (directory / "kills.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, directory: Path) -> Ended:
        fields = json.loads((directory / "kills.json").read_text())
        shots = [shot | {"victim": Victim(shot["victim"]), "phase": Phase(shot["phase"])} for shot in fields["shots"]]
        return cls(**fields | {"shots": [Shot(**shot) for shot in shots]})


def tiny(directory: Path, *, port: int, max_steps: int, flags: Sequence[str] = ()) -> list[str]:
    """The command of the smallest run that there is: two groups of four rollouts a batch, of eight tokens at most."""
    env = [{"id": ENV, "args": {"max_words": 3, "num_examples": NUM_EXAMPLES}}]
    return command(
        *("rl", "--model.name", MODEL, "--inference.server.port", str(port), "--output-dir", str(directory / "rl")),
        *("--max-steps", str(max_steps), "--seq-len", "128", "--orchestrator.batch-size", "8"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.sampling.max-tokens", "8"),
        *("--orchestrator.env", json.dumps(env), "--trainer.optim.lr", "1e-3", *flags),
    )


class KilledRun:
    """A run, from its first command to its end, whatever that is."""

    def __init__(
        self, directory: Path, argv: Sequence[str], kills: Sequence[Kill], *, max_steps: int, limit_s: float
    ) -> None:
        """`argv`: a command whose place is `directory/rl`. `kills` come one after the other."""
        directory.mkdir(parents=True, exist_ok=True)
        self.paths = RunPaths(directory / "rl")
        self.shots: list[Shot] = []
        self.on_entries: Callable[[Sequence[Entry]], None] = lambda entries: None
        """Called when the journal has grown, before what is killed next is looked for."""
        self._directory = directory
        self._argv = list(argv)
        self._pending = list(kills)
        self._max_steps = max_steps
        self._limit_s = limit_s
        self._launchers: list[int] = []
        self._left: list[str] = []
        self._entries: list[Entry] = []
        self._size = 0
        self._needed = 0
        """Steps that are to be trained before the next kill."""
        self._victim: psutil.Process | None = None
        self._next_look = 0.0

    def run(self) -> Ended:
        """Raises: AssertionError where processes outlive the launcher that was killed."""
        started = time.monotonic()
        self._start()
        try:
            while self._process.poll() is None and time.monotonic() < started + self._limit_s:
                self._step()
                time.sleep(POLL_S)
        finally:
            code = self._end()
            ended = Ended(code=code, seconds=time.monotonic() - started, shots=self.shots, left=self._left)
            ended.save(self._directory)
        return ended

    @property
    def launcher(self) -> psutil.Process:
        return self._launcher

    def entries(self) -> list[Entry]:
        """The journal so far."""
        try:
            size = self.paths.journal.stat().st_size
        except FileNotFoundError:  # nobody has begun yet, or a launcher that begins anew has removed it
            size = 0
        if size != self._size:
            self._size = size
            self._entries = read_journal(self.paths.journal)
        return self._entries

    def kill_now(self, victim: Victim, phase: Phase) -> bool:
        """Whether the victim was there to be killed, and was."""
        process, fired = find(self._launcher, victim, phase), len(self.shots)
        if process is not None:
            self._fire(Kill(victim, phase), process, begun=None)
        return len(self.shots) > fired

    def _start(self) -> None:
        with (self._directory / "rl.out").open("ab") as out:
            self._process = subprocess.Popen(
                self._argv,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._launcher = psutil.Process(self._process.pid)
        self._launchers.append(self._process.pid)

    def _step(self) -> None:
        """Kill what is to be killed now."""
        known, entries = self._entries, self.entries()
        if entries is not known:
            self.on_entries(entries)
        if not self._pending:
            return
        kill = self._pending[0]
        begun = opened(entries, kill.phase, kill.victim, max_steps=self._max_steps)
        is_due = begun is not None and (kill.phase is Phase.STARTING or steps_trained(entries) >= self._needed)
        if (is_due or kill.phase is not Phase.STARTING) and time.monotonic() >= self._next_look:
            if self._victim is None or not self._victim.is_running():
                self._victim = find(self._launcher, kill.victim, kill.phase)
            self._next_look = time.monotonic() + LOOK_INTERVAL_S
        if is_due and begun is not None and self._victim is not None:
            self._fire(kill, self._victim, begun)

    def _fire(self, kill: Kill, victim: psutil.Process, begun: Entry | None) -> None:
        self._victim, self._next_look = None, 0.0
        try:
            if victim.status() == psutil.STATUS_ZOMBIE:
                return
            victim.kill()
        except psutil.NoSuchProcess:
            return
        entries = self.entries()
        still = opened(entries, kill.phase, kill.victim, max_steps=self._max_steps)
        shot = Shot(
            victim=kill.victim,
            phase=kill.phase,
            pid=victim.pid,
            step=None if begun is None else begun.step,
            line=len(entries),
            counts=begun is not None and still == begun,
        )
        self.shots.append(shot)
        self._needed = steps_trained(entries) + 1
        tries = sum(one.kill == kill for one in self.shots)
        if self._pending and (shot.counts or tries >= TRIES):
            self._pending.pop(0)
        if kill.victim is Victim.LAUNCHER:
            self._go_on()

    def _go_on(self) -> None:
        """The same command, once nothing is left of the run whose launcher was killed."""
        self._process.wait()
        left = self._await_nobody(GONE_S)
        assert not left, f"{left} outlived the launcher {self._process.pid} by {GONE_S:g} s"
        self._start()

    def _await_nobody(self, limit_s: float) -> list[str]:
        """What is left of the run after at most `limit_s`, by pid and command line."""
        deadline = time.monotonic() + limit_s
        while left := left_over(self._launchers):
            if time.monotonic() >= deadline:
                return [describe(process) for process in left]
            time.sleep(LOOK_INTERVAL_S)
        return []

    def _end(self) -> int:
        """End what runs. The code of the last launcher; that of a signal where the run took too long."""
        is_late = self._process.poll() is None
        if is_late:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._left += self._await_nobody(GONE_S if is_late else 1.0)
        for process in left_over(self._launchers):
            process.kill()
        self._await_nobody(ENDING_S)
        return -signal.SIGTERM if is_late else self._process.returncode


def steps_trained(entries: Sequence[Entry]) -> int:
    """How far the run ever was, steps that were trained again counted once."""
    return 1 + max(
        (entry.step for entry in entries if entry.event == "batch_consumed" and entry.step is not None), default=-1
    )


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
