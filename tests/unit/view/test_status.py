import os
import time
from pathlib import Path

import pytest

from prime_rl import lifeline
from prime_rl.activity.files import Doing, Report, Wait, write_report
from prime_rl.activity.states import Condition, State
from prime_rl.errors import ConfigError, DataError
from prime_rl.journal import Entry, Journal
from prime_rl.paths import RunPaths
from prime_rl.view.status import Snapshot, cause, is_asked, show, snapshot, text

NOW = 1_732_212_000.0


def report(process, *waits, doing=(), children=None, **fields):
    tasks = tuple(Doing(text=text, since=NOW, for_s=1.0) for text in doing)
    given = {"token": "1:1", "host": "h", "time": NOW, "beat": 0.0, "age_s": 60.0} | fields
    return Report(process=process, waits=waits, doing=tasks, children=children or {}, **given)


def wait(owner, reason, waited_s=12.0, deadline_s=3600.0):
    return Wait(owner=owner, reason=reason, since=NOW - waited_s, waited_s=waited_s, deadline_s=deadline_s)


def entry(seconds, process, event, step=None, **facts):
    return Entry(time=NOW - seconds, process=process, event=event, step=step, facts=facts)


ALIVE = State(condition=Condition.ALIVE, pid=1)
STOPPED = State(condition=Condition.STOPPED, since_s=12.4, pid=2)
GONE = State(condition=Condition.GONE, since_s=3.0, pid=3)

REPORTS = {
    one.process: one
    for one in (
        report("launcher", doing=["watching inference, orchestrator, trainer"]),
        report("inference", doing=["serving weights 7, 31 requests"]),
        report(
            "orchestrator",
            wait("inference", "rollouts of batch 8: 31 are in flight", deadline_s=1800.0),
            doing=["generating batch 8: 3 of 16 groups"],
        ),
        report("trainer", wait("orchestrator", "batch 8")),
    )
}
ENTRIES = [
    entry(900, "launcher", "run_started", attempt=1),
    entry(600, "launcher", "run_started", attempt=2),
    *(entry(500 - step, "orchestrator", "batch_complete", step) for step in range(8)),
    *(entry(480 - step, "trainer", "batch_consumed", step, digest="d") for step in range(5)),
    entry(300, "launcher", "process_ended", name="trainer", how="trainer was killed by SIGKILL"),
    entry(300, "launcher", "restart", name="trainer", number=1, reason="trainer was killed by SIGKILL"),
    entry(290, "trainer", "went_back", 4),
    *(entry(280 - step, "trainer", "batch_consumed", step, digest="d") for step in range(4, 8)),
    entry(260, "trainer", "checkpoint_complete", 8, kind="checkpoint"),
]


def run_of(states=None, **fields):
    all_alive = dict.fromkeys(REPORTS, ALIVE)
    given = {"entries": ENTRIES, "reports": REPORTS, "max_steps": 50, "weights": 8, "checkpoint": 8, "recovery": None}
    return Snapshot(output_dir=Path("outputs/run"), now=NOW, states=all_alive | (states or {}), **given | fields)


@pytest.fixture
def in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_utc")
def test_a_run_in_eighty_columns():
    shown = text(run_of({"inference": STOPPED}))
    assert shown == EXPECTED
    assert max(map(len, shown.splitlines())) <= 80


EXPECTED = """\
run       outputs/run, attempt 2, begun 0:10:00 ago, going on
steps     trainer 8 of 50, orchestrator 8, weights 8
saved     checkpoint 8
restarts  17:55:00 trainer was killed by SIGKILL

process       state          at
launcher      alive          watching inference, orchestrator, trainer
inference     stopped 12 s   serving weights 7, 31 requests
orchestrator  alive          generating batch 8: 3 of 16 groups
                             waits 12 of 1800 s for inference: rollouts of batch
                             8: 31 are in flight
trainer       alive          waits 12 of 3600 s for orchestrator: batch 8

cause     trainer waits for orchestrator (batch 8), which waits for inference
          (rollouts of batch 8: 31 are in flight), which is stopped since 12 s;
          SIGCONT lets it go on

last events
  17:55:00  launcher     process_ended: trainer, trainer was killed by SIGKILL
  17:55:00  launcher     restart: trainer, trainer was killed by SIGKILL
  17:55:10  trainer      went_back 4
  17:55:24  trainer      batch_consumed 4
  17:55:25  trainer      batch_consumed 5
  17:55:26  trainer      batch_consumed 6
  17:55:27  trainer      batch_consumed 7
  17:55:40  trainer      checkpoint_complete 8: checkpoint"""


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ({"trainer": STOPPED}, "trainer is stopped since 12 s; SIGCONT lets it go on"),
        ({"orchestrator": GONE}, "trainer waits for orchestrator (batch 8), which is gone since 3 s"),
        ({"launcher": STOPPED}, "nobody waits for it yet, but launcher is stopped since 12 s; SIGCONT lets it go on"),
        (
            {"orchestrator's reverse-text worker 77": State(condition=Condition.STOPPED, pid=77)},
            "trainer waits for orchestrator (batch 8), which has a process in trouble: orchestrator's reverse-text "
            "worker 77 is stopped; SIGCONT lets it go on",
        ),
        (
            {},
            "nobody hangs; trainer waits for orchestrator (batch 8), which waits for inference (rollouts of batch 8: "
            "31 are in flight)",
        ),
    ],
)
def test_the_cause_is_at_the_end_of_the_chain_of_waits(states, sentence):
    assert cause(run_of(states)) == sentence


def test_of_several_servers_the_one_in_trouble_is_named():
    reports = {name: one for name, one in REPORTS.items() if name != "inference"}
    reports |= {"inference-0": report("inference-0"), "inference-1": report("inference-1")}
    states = dict.fromkeys(reports, ALIVE) | {"inference-1": GONE}
    run = Snapshot(output_dir=Path("run"), now=NOW, reports=reports, states=states)
    assert cause(run).endswith(
        "which waits for inference-1 (rollouts of batch 8: 31 are in flight), which is gone since 3 s"
    )


def test_a_wait_past_its_deadline_says_so():
    late = report("trainer", wait("orchestrator", "batch 8", 3601.0))
    assert "waits 3601 of 3600 s for orchestrator: batch 8, past its deadline" in text(
        run_of(reports=REPORTS | {"trainer": late}), 200
    )


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (entry(1, "launcher", "run_complete"), "complete"),
        (entry(1, "launcher", "run_stopped", reason="the disk is full"), "stopped: the disk is full; the same command"),
        (None, "not complete, and its launcher is gone; the same command goes on"),
    ],
)
def test_a_run_that_has_ended_says_how_and_has_no_cause(last, how):
    ended = State(condition=Condition.ENDED)
    states = dict.fromkeys(REPORTS, ended) | {"launcher": GONE}
    shown = text(run_of(states, entries=[*ENTRIES, *([last] if last else [])]), 200)
    assert how in shown.splitlines()[0]
    assert "cause" not in shown
    assert "waits" not in shown


def test_a_run_directory_is_read_whatever_there_is_of_it(tmp_path):
    paths = RunPaths(tmp_path)
    Journal(paths.journal, "launcher").note("run_started", attempt=1)
    assert "steps     trainer 0" in text(snapshot(tmp_path))
    paths.activity.mkdir()
    own = report("trainer", doing=["training step 3"], token=lifeline.launcher_token(), beat=time.monotonic())
    write_report(paths.activity, own)
    paths.configs.mkdir()
    paths.config("trainer").write_text("max_steps = 7\n")
    shown = text(snapshot(tmp_path))
    assert "trainer 0 of 7" in shown
    assert "trainer       alive          training step 3" in shown


def test_without_a_run_or_with_a_damaged_journal_it_is_an_error_in_words(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no run in .*: it has no journal.jsonl and no activity/; name"):
        snapshot(tmp_path)
    with pytest.raises(ConfigError, match="it does not exist"):
        snapshot(tmp_path / "nowhere")
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="line 1 of"):
        snapshot(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["--status", "{run}"],
        ["--status={run}"],
        ["--status", "--output-dir", "{run}"],
        ["--output-dir", "{run}", "--status"],
    ],
)
def test_the_directory_is_named_or_that_of_the_configuration(tmp_path, words):
    Journal(RunPaths(tmp_path).journal, "launcher").note("run_started", attempt=1)
    words = [word.format(run=tmp_path) for word in words]
    assert is_asked(words)
    assert show(words).startswith("run ")
    assert str(tmp_path) in show(words).replace("\n          ", "")


def test_a_command_line_without_it_does_not_ask():
    assert not is_asked(["@", "rl.toml", "--max-steps", "3", f"--output-dir={os.sep}--status"])
