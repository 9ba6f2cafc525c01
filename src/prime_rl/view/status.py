"""`rl --status [DIR]`: how a run is, from outside: who is at what, who waits for whom, and who holds all of them up.

Everything is read from the run directory, and from the system by pid, while the run goes on and after it has ended.
"""

import shutil
import textwrap
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prime_rl.activity.causes import LAUNCHER, Chain, chain
from prime_rl.activity.files import Report, Wait, is_of, read_reports
from prime_rl.activity.states import Condition, State, all_states
from prime_rl.config.load import load
from prime_rl.config.roots import RLConfig
from prime_rl.errors import ConfigError
from prime_rl.journal import Entry, history, read_journal
from prime_rl.paths import RunPaths
from prime_rl.transport.checkpoints import complete_checkpoints
from prime_rl.transport.manifest import latest_step

STATUS: Final = "--status"
NUM_EVENTS: Final = 8
WIDTH: Final = 80
ORDER: Final = (LAUNCHER, "router", "inference", "teacher", "orchestrator", "trainer", "sft", "eval")
"""Of the processes in the table; the others come last."""
BEGINNINGS: Final = ("trainer", "sft", "orchestrator", "eval")
"""Where the chain of waits begins: the first of these that there is. Everything else is for them."""
NAME_WIDTH: Final = 13
STATE_WIDTH: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment, as far as it was read."""

    output_dir: Path
    now: float
    """Unix seconds."""
    entries: Sequence[Entry] = ()
    reports: Mapping[str, Report] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)
    max_steps: int | None = None
    weights: int | None = None
    """The newest that are complete."""
    checkpoint: int | None = None
    recovery: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run has done all its steps."""
        return self._last("run_started", "run_complete", "run_stopped") == "run_complete"

    @property
    def ending(self) -> str:
        """How the last launcher ended, in words; "" while it runs, or where there was none."""
        last = self._last("run_started", "run_complete", "run_stopped")
        if last == "run_complete":
            return "complete"
        if last == "run_stopped":
            reason = next(entry for entry in reversed(self.entries) if entry.event == "run_stopped").facts.get("reason")
            return f"stopped: {reason}; the same command goes on"
        launcher = self.states.get(LAUNCHER)
        if launcher is not None and launcher.condition in (Condition.GONE, Condition.ENDED):
            return "not complete, and its launcher is gone; the same command goes on"
        return ""

    def _last(self, *events: str) -> str:
        return next((entry.event for entry in reversed(self.entries) if entry.event in events), "")


def snapshot(output_dir: Path) -> Snapshot:
    """Look at a run. Raises: ConfigError where there is none, DataError for a damaged journal."""
    paths = RunPaths(output_dir)
    entries, reports = read_journal(paths.journal), read_reports(paths.activity)
    if not entries and not reports:
        why = "has no journal.jsonl and no activity/" if output_dir.is_dir() else "does not exist"
        raise ConfigError(f"there is no run in {output_dir}: it {why}; name the run's directory: rl --status DIR")
    return Snapshot(
        output_dir=output_dir,
        now=time.time(),
        entries=entries,
        reports=reports,
        states=all_states(reports, paths.activity),
        max_steps=_max_steps(paths),
        weights=latest_step(paths.weights),
        checkpoint=max(complete_checkpoints(paths.checkpoints), default=None),
        recovery=max(complete_checkpoints(paths.recovery), default=None),
    )


def _max_steps(paths: RunPaths) -> int | None:
    for process in ("rl", "trainer", "sft"):
        try:
            found = tomllib.loads(paths.config(process).read_text(encoding="utf-8")).get("max_steps")
        except (OSError, ValueError):
            continue
        return found if isinstance(found, int) else None
    return None


def text(run: Snapshot, width: int = WIDTH) -> str:
    """All of it, in lines of at most `width` columns."""
    paragraphs = [_summary(run), _table(run), _cause(run), _events(run)]
    return "\n\n".join("\n".join(_wrapped(lines, width)) for lines in paragraphs if lines)


def _wrapped(lines: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Lines of a head and words; the words go on below themselves where they are too long."""
    for head, words in lines:
        yield from textwrap.wrap(
            words, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        ) or [head.rstrip()]


def _summary(run: Snapshot) -> list[tuple[str, str]]:
    started = [entry for entry in run.entries if entry.event == "run_started"]
    how = run.ending or ("going on" if LAUNCHER in run.reports else "")
    attempt = f"attempt {len(started)}, begun {_ago(run.now - started[-1].time)} ago" if started else ""
    words = [str(run.output_dir), attempt, how]
    lines = [("run       ", ", ".join(filter(None, words)))]
    of = f" of {run.max_steps}" if run.max_steps else ""
    trained = history(run.entries)
    batches = [entry.step for entry in run.entries if entry.event == "batch_complete" and entry.step is not None]
    steps = [f"trainer {1 + (trained[-1].step or 0) if trained else 0}{of}"]
    steps += [f"orchestrator {1 + batches[-1]}"] if batches else []
    steps += [f"weights {run.weights}"] if run.weights is not None else []
    lines.append(("steps     ", ", ".join(steps)))
    saved = [f"checkpoint {run.checkpoint}"] if run.checkpoint is not None else []
    saved += [f"recovery checkpoint {run.recovery}"] if run.recovery is not None else []
    lines.append(("saved     ", ", ".join(saved) or "no checkpoint"))
    restarts = [entry for entry in run.entries if entry.event == "restart"]
    for index, entry in enumerate(restarts[-3:]):
        head = "restarts  " if index == 0 else " " * 10
        reason = str(entry.facts.get("reason", entry.facts.get("name", "")))
        first = f"{len(restarts)} in all; " if index == 0 and len(restarts) > 3 else ""
        lines.append((head, f"{first}{_clock(entry.time)} {reason}"))
    return lines


def _table(run: Snapshot) -> list[tuple[str, str]]:
    names = {*run.states, *run.reports}
    if not names:
        return []
    width = max(NAME_WIDTH, *(len(name) for name in names if "'s " not in name)) + 1
    lines = [(f"{'process':{width}}{'state':{STATE_WIDTH}}", "at")]
    for name in sorted(names, key=_place):
        state = run.states[name]
        since = "" if state.since_s is None else f" {state.since_s:.0f} s"
        head = f"{name:{width}}{state.condition + since:{STATE_WIDTH}}"
        report = run.reports.get(name)
        said = _said(report) if report is not None and state.condition not in _OVER else []
        for words in said or [f"pid {state.pid}" if "'s " in name else ""]:
            lines.append((head, words))
            head = " " * (width + STATE_WIDTH)
    return lines


_OVER: Final = (Condition.GONE, Condition.ENDED, Condition.STARTING)


def _said(report: Report) -> list[str]:
    """What a process is at, and its waits, those for the same once."""
    words = [task.text for task in reversed(report.doing)]
    once: dict[tuple[str, str], Wait] = {}
    for wait in report.waits:
        once.setdefault((wait.owner, wait.reason), wait)
    return words + [_waits(wait) for wait in once.values()]


def _waits(wait: Wait) -> str:
    limit = "" if wait.deadline_s is None else f" of {wait.deadline_s:.0f}"
    late = ", past its deadline" if wait.is_overdue else ""
    return f"waits {wait.waited_s:.0f}{limit} s for {wait.owner}: {wait.reason}{late}"


def _place(name: str) -> tuple[int, str]:
    return next((place for place, group in enumerate(ORDER) if is_of(name.partition("'s ")[0], group)), 99), name


def _cause(run: Snapshot) -> list[tuple[str, str]]:
    """Who holds up the run."""
    if run.ending or not run.states:
        return []
    return [("cause     ", cause(run))]


def cause(run: Snapshot) -> str:
    """In a sentence: the chain of waits, and what is wrong with the process at its end."""
    start = next((one for one in BEGINNINGS if any(is_of(name, one) for name in run.reports)), LAUNCHER)
    found = chain(run.reports, start, lambda name: trouble(run.states, name))
    if not found.trouble:
        others = [f"{name} {why}" for name in sorted(run.states, key=_place) if (why := run.states[name].trouble)]
        if others:
            return f"nobody waits for it yet, but {'; '.join(others)}{_way_out(others)}"
        return f"nobody hangs; {_links(found)}" if found.waits else "nobody hangs"
    return f"{_links(found)}{', which' if found.waits else found.end} {found.trouble}{_way_out([found.trouble])}"


def _way_out(troubles: Sequence[str]) -> str:
    return "; SIGCONT lets it go on" if any("stopped" in trouble for trouble in troubles) else ""


def trouble(states: Mapping[str, State], name: str) -> str:
    """What is wrong with a process, or with one that it has started; "" where nothing is."""
    if name in states and (own := states[name].trouble):
        return own
    children = [f"{child} {state.trouble}" for child, state in states.items() if child.startswith(f"{name}'s ")]
    return f"has a process in trouble: {'; '.join(children)}" if children else ""


def _links(found: Chain) -> str:
    """Example: "trainer waits for orchestrator (batch 8), which waits for inference (rollouts of batch 8)"."""
    links = [f"waits for {_owner(found, index)} ({wait.reason})" for index, (_, wait) in enumerate(found.waits)]
    return f"{found.waits[0][0]} {', which '.join(links)}" if links else ""


def _owner(found: Chain, index: int) -> str:
    """By the name that the next one in the chain has, where several do the same work."""
    following = [name for name, _ in found.waits[index + 1 : index + 2]] or [found.end]
    return following[0]


def _events(run: Snapshot) -> list[tuple[str, str]]:
    if not run.entries:
        return []
    lines = [("last events", "")]
    for entry in run.entries[-NUM_EVENTS:]:
        step = "" if entry.step is None else f" {entry.step}"
        facts = [str(entry.facts[name]) for name in ("name", "kind", "how", "reason") if name in entry.facts]
        more = f": {', '.join(facts)}" if facts else ""
        lines.append((f"  {_clock(entry.time)}  {entry.process:{NAME_WIDTH}}", f"{entry.event}{step}{more}"))
    return lines


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _ago(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def is_asked(words: Sequence[str]) -> bool:
    """Whether a command line asks for the status."""
    return any(word == STATUS or word.startswith(f"{STATUS}=") for word in words)


def show(words: Sequence[str]) -> str:
    """The answer to a command line with `--status [DIR]`; without DIR, of the `output_dir` that its other words say.

    Raises: ConfigError, DataError.
    """
    index = next(index for index, word in enumerate(words) if is_asked([word]))
    directory, rest = words[index].partition("=")[2], [*words[:index], *words[index + 1 :]]
    if not directory and index < len(rest) and rest[index][:1] not in ("-", "@"):
        directory = rest.pop(index)
    output_dir = Path(directory) if directory else load(RLConfig, rest).output_dir
    return text(snapshot(output_dir), shutil.get_terminal_size((WIDTH, 24)).columns)
