"""The harness itself: it kills whom it says, counts what it may count, and its checks find what they are for."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from prime_rl.journal import Entry, Journal, read_journal
from prime_rl.paths import RunPaths
from prime_rl.transport.manifest import publish_dir
from tests.chaos import kills as kills_module
from tests.chaos.cells import FLAVOURS, RUNS, Result, kills_of, never_fired, read, table
from tests.chaos.endstate import BATCH, READABLE, check_batches, check_files, check_history, check_metrics
from tests.chaos.kills import Ended, Kill, KilledRun, Shot
from tests.chaos.memory import Sample, disk, slopes
from tests.chaos.phases import Phase, Victim, opened

SCRIPT = str(Path(__file__).with_name("scripted.py"))


def entries_of(*said: str) -> list[Entry]:
    """From lines such as "trainer batch_consumed 3 digest=ab"."""
    found = []
    for line in said:
        process, event, *rest = line.split()
        steps = [int(word) for word in rest if word.isdecimal()]
        facts = dict(word.split("=") for word in rest if "=" in word)
        found.append(Entry(time=0.0, process=process, event=event, step=steps[0] if steps else None, facts=facts))
    return found


TRAINING = Kill(Victim.TRAINER, Phase.TRAINING)


@pytest.mark.parametrize(
    ("kill", "said", "expected"),
    [
        (TRAINING, ["trainer batch_received 3"], 0),
        (TRAINING, ["trainer batch_received 3", "trainer batch_consumed 3 digest=a"], None),
        (TRAINING, ["trainer batch_received 3", "launcher process_started name=trainer"], None),
        (TRAINING, ["trainer batch_received 3", "launcher process_started name=orchestrator"], 0),
        (TRAINING, ["trainer batch_received 3", "orchestrator batch_complete 4 digest=b"], 0),
        (Kill(Victim.RANK_1, Phase.PUBLISHING), ["trainer weights_begun 3", "trainer weights_begun 4"], 1),
        (
            Kill(Victim.INFERENCE, Phase.PUBLISHING),
            ["trainer weights_begun 3", "trainer weights_begun 4", "trainer weights_published 4 digest=a"],
            0,
        ),
        (Kill(Victim.INFERENCE, Phase.GENERATING), ["orchestrator batch_complete 3 digest=a"], 0),
        (
            Kill(Victim.INFERENCE, Phase.GENERATING),
            ["orchestrator batch_complete 3 digest=a", "orchestrator batch_begun 4"],
            None,
        ),
        (Kill(Victim.INFERENCE, Phase.GENERATING), ["orchestrator batch_complete 9 digest=a"], None),
        (Kill(Victim.ENV_WORKER, Phase.STARTING), ["launcher process_started name=orchestrator"], 0),
        (Kill(Victim.ENV_WORKER, Phase.STARTING), ["launcher process_started name=trainer"], None),
        (
            Kill(Victim.TRAINER, Phase.STARTING),
            ["launcher process_started name=trainer", "trainer went_back 0"],
            None,
        ),
        (
            Kill(Victim.LAUNCHER, Phase.STARTING),
            ["launcher run_started attempt=1", "launcher process_started name=trainer", "trainer went_back 0"],
            0,
        ),
        (
            Kill(Victim.INFERENCE, Phase.STARTING),
            ["launcher process_started name=inference", "orchestrator batch_begun 0"],
            None,
        ),
    ],
)
def test_a_phase_is_open_from_its_begin_to_its_end_or_a_new_start(kill: Kill, said: list[str], expected: int | None):
    entries = entries_of(*said)
    found = opened(entries, kill.phase, kill.victim, max_steps=10)
    assert found is (None if expected is None else entries[expected])


def scripted(directory: Path, kills: Sequence[Kill], *flags: str, steps: int = 30) -> tuple[Ended, list[Entry]]:
    argv = [sys.executable, SCRIPT, str(directory / "rl"), str(steps), *flags]
    run = KilledRun(directory, argv, kills, max_steps=steps, limit_s=60)
    return run.run(), read_journal(run.paths.journal)


def test_the_victim_is_killed_in_its_phase_and_the_run_goes_on(tmp_path: Path):
    kills = [TRAINING, Kill(Victim.TRAINER, Phase.TRAINING)]
    ended, entries = scripted(tmp_path, kills, steps=100)
    counted = [shot for shot in ended.shots if shot.counts]
    assert [shot.kill for shot in counted] == kills
    pids = [entry.facts["pid"] for entry in entries if entry.event == "process_started"]
    assert [shot.pid for shot in ended.shots] == pids[: len(ended.shots)]
    for shot in counted:
        before = entries[: shot.line]
        assert before[-1].event == "batch_received"
        assert before[-1].step == shot.step
    assert counted[0].step != counted[1].step
    assert ended.code == 0
    assert Ended.read(tmp_path) == ended


def test_a_launcher_that_is_killed_is_followed_by_the_same_command(tmp_path: Path):
    ended, entries = scripted(tmp_path, [Kill(Victim.LAUNCHER, Phase.TRAINING), TRAINING])
    assert [shot.kill for shot in ended.shots if shot.counts] == [Kill(Victim.LAUNCHER, Phase.TRAINING), TRAINING]
    attempts = [entry.facts["attempt"] for entry in entries if entry.event == "run_started"]
    assert attempts == list(range(1, len(attempts) + 1))
    assert len(attempts) >= 2
    assert (ended.code, ended.left) == (0, [])


def test_a_process_that_outlives_its_launcher_is_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kills_module, "GONE_S", 1.0)
    with pytest.raises(AssertionError, match="outlived the launcher"):
        scripted(tmp_path, [Kill(Victim.LAUNCHER, Phase.TRAINING)], "--stubborn")
    (left,) = Ended.read(tmp_path).left
    assert "prime_rl.cli trainer" in left
    pid = int(left.partition(":")[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_journal_that_a_new_beginning_removes_is_no_end(tmp_path: Path):
    run = KilledRun(tmp_path, [], [], max_steps=1, limit_s=1)
    journal = Journal(run.paths.journal, "launcher")
    is_over = threading.Event()

    def begin_anew() -> None:
        while not is_over.is_set():
            journal.note("run_started")
            run.paths.journal.unlink()

    thread = threading.Thread(target=begin_anew)
    thread.start()
    try:
        seen = {len(run.entries()) for _ in range(1000)}
    finally:
        is_over.set()
        thread.join()
    assert seen <= {0, 1}
    assert run.entries() == []


def test_nothing_is_killed_in_a_phase_that_was_never_seen_open(tmp_path: Path):
    ended, _ = scripted(tmp_path, [Kill(Victim.TRAINER, Phase.PUBLISHING)], steps=5)
    assert ended.shots == []
    assert ended.code == 0


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path):
    argv = [sys.executable, SCRIPT, str(tmp_path / "rl"), "100000"]
    ended = KilledRun(tmp_path, argv, [], max_steps=100_000, limit_s=1.0).run()
    assert ended.code < 0
    assert ended.left == []


SOUND = (
    "orchestrator batch_complete 0 digest=a",
    "trainer batch_consumed 0 digest=a",
    "orchestrator batch_complete 1 digest=b",
    "trainer batch_consumed 1 digest=b",
    "trainer went_back 1",
    "trainer batch_consumed 1 digest=b",
    "launcher run_complete",
)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([*SOUND[:4], SOUND[-1]], id="never disturbed"),
        pytest.param(SOUND, id="trained again"),
    ],
)
def test_a_sound_history_passes(said: Sequence[str]):
    check_history(entries_of(*said), steps=2)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([*SOUND[:2], SOUND[-1]], id="a step is missing"),
        pytest.param([*SOUND[:4], SOUND[3], SOUND[-1]], id="a step counts twice"),
        pytest.param([*SOUND[:5], "trainer batch_consumed 1 digest=c", SOUND[-1]], id="trained again on another batch"),
        pytest.param([*SOUND[:3], "orchestrator batch_complete 1 digest=c", *SOUND[3:]], id="a batch written twice"),
        pytest.param(SOUND[:-1], id="never complete"),
        pytest.param(
            [*SOUND[:4], "trainer weights_published 2 digest=x", "trainer weights_published 2 digest=y", SOUND[-1]],
            id="other weights of the same step",
        ),
    ],
)
def test_a_history_in_which_something_is_lost_or_twice_does_not_pass(said: Sequence[str]):
    with pytest.raises(AssertionError):
        check_history(entries_of(*said), steps=2)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunPaths:
    """Two steps; batch 0 is no longer needed."""
    paths = RunPaths(tmp_path / "rl")
    (paths.rollouts / "step_0").mkdir(parents=True)
    (paths.rollouts / "step_0" / READABLE).touch()
    with publish_dir(paths.rollouts / "step_1") as draft:
        (draft / BATCH).write_bytes(b"batch")
    for step in (1, 2):
        with publish_dir(paths.weights / f"step_{step}") as draft:
            (draft / "model.safetensors").write_bytes(b"weights")
    for process in ("orchestrator", "trainer"):
        paths.metrics(process).parent.mkdir()
        paths.metrics(process).write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1)))
    return paths


def test_a_whole_run_directory_passes(run_dir: RunPaths):
    check_files(run_dir, steps=2)
    check_metrics(run_dir, steps=2)


@pytest.mark.parametrize(
    "name",
    ["weights/.step_3.tmp-77", "recovery/step_2", "rollouts/step_0/batch.msgpack", "weights/step_1/more", "x.tmp"],
)
def test_a_file_that_does_not_belong_there_does_not_pass(run_dir: RunPaths, name: str):
    path = run_dir.output_dir / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if "step_" in path.name else path.touch()
    if path.parent.name == "step_1":
        path.unlink()
        path.parent.joinpath("model.safetensors").write_bytes(b"half")
    with pytest.raises(Exception, match=r"step_|tmp"):
        check_files(run_dir, steps=2)


def test_a_step_that_is_twice_in_the_metrics_does_not_pass(run_dir: RunPaths):
    with run_dir.metrics("trainer").open("a") as file:
        file.write('{"step": 1}\n')
    with pytest.raises(AssertionError, match="trainer's metrics"):
        check_metrics(run_dir, steps=2)


def test_a_batch_that_is_not_what_was_trained_on_does_not_pass(run_dir: RunPaths):
    with pytest.raises(AssertionError, match="batch 1 has several digests"):
        check_batches(entries_of(*SOUND), run_dir, steps=2)


def shot_of(kill: Kill, *, counts: bool = True) -> Shot:
    return Shot(victim=kill.victim, phase=kill.phase, pid=1, step=1, line=3, counts=counts)


def test_the_table_counts_kills_in_their_phase_and_those_after_which_all_held(tmp_path: Path):
    good = Ended(code=0, seconds=1.0, shots=[shot_of(TRAINING), shot_of(TRAINING, counts=False)])
    other = Kill(Victim.LAUNCHER, Phase.STARTING)
    bad = Ended(code=1, seconds=1.0, shots=[shot_of(TRAINING), shot_of(other)])
    results = [Result("recovery", Phase.TRAINING, good), Result("checkpoints", Phase.TRAINING, bad, "lost a batch")]
    rows = {line[:17].strip(): line[17:].split() for line in table(results).splitlines()}
    assert rows["trainer rank 0"][9:12] == ["2", "/", "1"]
    assert rows["launcher"][:3] == ["1", "/", "0"]
    assert "3 kills in their phase, after which 1 times everything held; 1 more" in table(results)
    assert TRAINING not in never_fired(results)
    assert Kill(Victim.RANK_1, Phase.TRAINING) in never_fired(results)
    for result in results:
        directory = tmp_path / f"{result.name}-training"
        directory.mkdir()
        result.ended.save(directory)
        if result.complaint:
            (directory / "complaint.txt").write_text(result.complaint)
    assert read(tmp_path) == results


def test_the_plan_has_every_cell_and_at_least_sixty_kills():
    planned = [kill for name, phase in RUNS for kill in kills_of(name, phase)]
    assert set(planned) == {Kill(victim, phase) for victim in Victim for phase in Phase}
    assert len(planned) >= 60
    assert len(FLAVOURS) == 3
    assert len({(name, phase) for name, phase in RUNS}) == len(RUNS)


def samples_of(name: str, pid: int, values: Sequence[tuple[int, float]]) -> list[Sample]:
    return [Sample(name=name, pid=pid, step=step, mib=mib) for step, mib in values]


def test_the_slope_of_memory_is_within_each_start_and_behind_its_warm_up():
    steps = range(0, 60, 3)
    first = samples_of("trainer", 1, [(step, 100 + 0.03 * step + (400 if step < 15 else 0)) for step in steps])
    second = samples_of("trainer", 2, [(60 + step, 50 + 0.03 * step) for step in steps])
    found = slopes([*first, *second, *samples_of("launcher", 3, [(0, 10.0)])])
    assert found.keys() == {"trainer"}
    assert found["trainer"].value == pytest.approx(3.0)
    assert found["trainer"].standard_error == pytest.approx(0, abs=1e-6)
    assert found["trainer"].num_starts == 2


def test_disk_counts_what_retention_bounds(run_dir: RunPaths):
    (run_dir.weights / ".step_3.tmp-9").mkdir()
    (run_dir.weights / ".step_3.tmp-9" / "model.safetensors").write_bytes(bytes(1 << 20))
    used = disk(run_dir)
    assert (used.weights, used.checkpoints, used.recovery, used.batches) == (3, 0, 0, 1)
    assert 1 < used.mib < 1.1
