import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import drop_rows, go_back, sources


@pytest.fixture
def paths(tmp_path):
    """A run that has trained 6 batches and has checkpoints after 2, 4 and 6 of them."""
    paths = RunPaths(tmp_path / "run")
    for root in (paths.weights, paths.merged):
        make(root, range(1, 7))
    for root in (paths.rollouts, paths.traces):
        make(root, range(7))
    make(paths.checkpoints, (2, 4, 6))
    make(paths.recovery, (5,))
    make(paths.evals, (0, 3, 6))
    for process in ("trainer", "orchestrator", "eval"):
        write_rows(paths.metrics(process), range(6))
    return paths


def make(root, steps):
    for step in steps:
        step_dir(root, step).mkdir(parents=True)
        (step_dir(root, step) / "content").write_text(f"{root.name} {step}")


def write_rows(path, steps):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in steps))


def steps_in(root):
    return sorted(int(entry.name.removeprefix("step_")) for entry in root.glob("step_*"))


def rows_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def everything(paths):
    """All contents, wherever they lie."""
    return sorted(file.read_text() for file in paths.output_dir.rglob("content"))


def test_going_back_sets_aside_what_lies_beyond_the_step(paths):
    before = everything(paths)
    aside = go_back(paths, 4)
    assert aside == paths.superseded / "1"
    old = RunPaths(aside)
    assert steps_in(paths.weights) == steps_in(paths.merged) == [1, 2, 3, 4]
    assert steps_in(old.weights) == steps_in(old.merged) == [5, 6]
    assert steps_in(paths.rollouts) == steps_in(paths.traces) == [0, 1, 2, 3]
    assert steps_in(old.rollouts) == steps_in(old.traces) == [4, 5, 6]
    assert (steps_in(paths.checkpoints), steps_in(old.checkpoints)) == ([2, 4], [6])
    assert (steps_in(paths.recovery), steps_in(old.recovery)) == ([], [5])
    assert (steps_in(paths.evals), steps_in(old.evals)) == ([0, 3], [6])
    for process in ("trainer", "orchestrator"):
        assert (rows_in(paths.metrics(process)), rows_in(old.metrics(process))) == ([0, 1, 2, 3], [4, 5])
    assert (rows_in(paths.metrics("eval")), rows_in(old.metrics("eval"))) == ([0, 1, 2, 3, 4], [5])
    assert everything(paths) == before
    assert (step_dir(old.weights, 6) / "content").read_text() == "weights 6"


def test_going_back_twice_finds_nothing_more_and_further_back_has_a_place_of_its_own(paths):
    go_back(paths, 4)
    assert go_back(paths, 4) is None
    assert not (paths.superseded / "2").exists()
    assert go_back(paths, 2) == paths.superseded / "2"
    assert steps_in(RunPaths(paths.superseded / "2").checkpoints) == [4]


def test_a_process_alone_sets_aside_its_own(paths):
    aside = go_back(paths, 4, owns=("orchestrator",))
    assert aside is not None
    assert steps_in(paths.weights) == [1, 2, 3, 4, 5, 6]
    assert steps_in(paths.checkpoints) == [2, 4, 6]
    assert rows_in(paths.metrics("trainer")) == [0, 1, 2, 3, 4, 5]
    assert steps_in(paths.rollouts) == [0, 1, 2, 3]
    assert go_back(paths, 4, owns=("trainer",)) == paths.superseded / "2"
    assert steps_in(paths.weights) == [1, 2, 3, 4]


def test_checkpoints_elsewhere_stay_elsewhere(paths, tmp_path):
    elsewhere = tmp_path / "big-disk"
    make(elsewhere, (2, 8))
    go_back(paths, 4, checkpoints=elsewhere)
    assert steps_in(elsewhere) == [2]
    assert steps_in(elsewhere / "superseded" / "1") == [8]
    assert steps_in(paths.checkpoints) == [2, 4, 6]


@pytest.mark.parametrize("linked", ["weights", "checkpoints"])
def test_what_lies_on_another_disk_behind_a_link_stays_there(paths, linked):
    """No rename leads from one disk to another; a file system in memory is one on every machine that runs this."""
    with TemporaryDirectory(dir="/dev/shm") as disk:
        assert os.stat(disk).st_dev != paths.output_dir.stat().st_dev
        root, other = paths.output_dir / linked, Path(disk, linked)
        shutil.move(root, other)
        root.symlink_to(other)
        before = len(everything_in(paths.output_dir, other))
        go_back(paths, 4)
        assert (steps_in(root)[-1], steps_in(other / "superseded" / "1")[-1]) == (4, 6)
        assert (steps_in(paths.rollouts), steps_in(paths.superseded / "1" / "rollouts")) == ([0, 1, 2, 3], [4, 5, 6])
        go_back(paths, 4, counts_anew=True)
        assert steps_in(root) == []
        roots = sources(paths, None, 4, counts_anew=True)
        assert 4 in steps_in(roots[0])
        assert len(everything_in(paths.output_dir, other)) == before


def everything_in(*roots):
    return [file for root in roots for file in root.rglob("content")]


class Killed(BaseException):
    """Stands for kill -9 between two renames."""


@pytest.mark.parametrize("survived", range(17))
def test_whoever_is_killed_while_going_back_leaves_a_run_that_is_sound(paths, monkeypatch, survived):
    """However far it came: nothing is lost, batches and weights have no gap, no checkpoint is without its batches."""
    before, renames = everything(paths), 0
    real = type(paths.weights).rename

    def rename(path, target):
        nonlocal renames
        renames += 1
        if renames > survived:
            raise Killed
        return real(path, target)

    monkeypatch.setattr(type(paths.weights), "rename", rename)
    try:
        go_back(paths, 2)
    except Killed:
        assert renames == survived + 1
    monkeypatch.undo()
    batches, checkpoints, weights = (steps_in(root) for root in (paths.rollouts, paths.checkpoints, paths.weights))
    assert batches == list(range(len(batches)))
    assert weights == list(range(1, len(weights) + 1))
    assert max(checkpoints) <= len(batches)
    assert max(checkpoints) <= len(weights)
    assert everything(paths) == before
    go_back(paths, 2)
    assert steps_in(paths.rollouts) == [0, 1]
    assert steps_in(paths.weights) == [1, 2]
    assert everything(paths) == before


def test_a_run_that_counts_its_steps_anew_begins_with_nothing_that_has_a_number(paths):
    make(paths.weights, (0,))
    before = everything(paths)
    aside = go_back(paths, 4, counts_anew=True)
    assert aside == paths.superseded / "1"
    roots = (paths.checkpoints, paths.recovery, paths.weights, paths.merged, paths.rollouts, paths.traces, paths.evals)
    assert [steps_in(root) for root in roots] == [[]] * 7
    for process in ("trainer", "orchestrator", "eval"):
        assert rows_in(paths.metrics(process)) == []
        assert rows_in(RunPaths(aside).metrics(process)) == [0, 1, 2, 3, 4, 5]
    assert steps_in(RunPaths(aside).weights) == [0, 1, 2, 3, 4, 5, 6]
    assert everything(paths) == before


@pytest.mark.parametrize("step", [4, 5, -1])
def test_the_checkpoint_of_a_run_that_counts_anew_is_found_where_it_was_set_aside(paths, step):
    here = [paths.checkpoints, paths.recovery]
    assert sources(paths, None, step, counts_anew=True) == here
    go_back(paths, 6, counts_anew=True)
    aside = RunPaths(paths.superseded / "1")
    assert sources(paths, None, step, counts_anew=True) == [aside.checkpoints, aside.recovery]
    make(paths.traces, (0,))
    go_back(paths, 0, owns=("orchestrator",))
    assert (paths.superseded / "2" / "traces").exists()
    assert sources(paths, None, step, counts_anew=True) == [aside.checkpoints, aside.recovery]
    assert sources(paths, None, 7, counts_anew=True) == sources(paths, None, step) == here
    make(paths.checkpoints, (4,))  # by the new count
    assert sources(paths, None, 4, counts_anew=True) == here


def test_a_checkpoint_elsewhere_is_found_where_it_was_set_aside(paths, tmp_path):
    elsewhere = tmp_path / "big-disk"
    make(elsewhere, (2, 8))
    make(elsewhere / "superseded" / "3", (2,))
    go_back(paths, 8, checkpoints=elsewhere, counts_anew=True)
    found = sources(paths, elsewhere, 8, counts_anew=True)
    assert found == [elsewhere / "superseded" / "4", paths.superseded / "4" / "recovery"]
    assert [steps_in(root) for root in found] == [[2, 8], [5]]


@pytest.mark.parametrize("survived", range(0, 33, 2))
def test_whoever_is_killed_while_counting_anew_leaves_a_run_that_goes_back_to_the_same_checkpoint(
    paths, monkeypatch, survived
):
    before, renames = everything(paths), 0
    real = type(paths.weights).rename

    def rename(path, target):
        nonlocal renames
        renames += 1
        if renames > survived:
            raise Killed
        return real(path, target)

    monkeypatch.setattr(type(paths.weights), "rename", rename)
    with pytest.raises(Killed):
        go_back(paths, 4, counts_anew=True)
    monkeypatch.undo()
    batches, newest = steps_in(paths.rollouts), steps_in(paths.checkpoints)[-1]
    assert newest >= 4  # from there it can go on, too:
    assert batches == list(range(min(batches, default=newest), max(batches, default=newest - 1) + 1))
    assert max(batches, default=3) >= newest - 1
    assert sources(paths, None, 4, counts_anew=True) == [paths.checkpoints, paths.recovery]
    go_back(paths, 4, counts_anew=True)
    assert [steps_in(root) for root in (paths.rollouts, paths.checkpoints, paths.weights)] == [[], [], []]
    assert everything(paths) == before


def test_rows_are_dropped_with_a_last_one_that_was_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(4))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert drop_rows(path, 3)
    assert rows_in(path) == [0, 1, 2]
    assert not drop_rows(path, 3)
    assert list(tmp_path.iterdir()) == [path]


def test_whoever_is_killed_while_rows_are_dropped_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(4))

    def replace(path, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", replace)
        with pytest.raises(Killed):
            drop_rows(path, 2)
    assert drop_rows(path, 2)
    assert (rows_in(path), [file.name for file in tmp_path.iterdir()]) == ([0, 1], [path.name])


def test_a_damaged_row_ends_nothing_and_is_kept_beside_the_others(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    for row in ("hm", "[]"):
        path.write_text(f'{{"step": 0}}\n{row}\n{{"step": 1}}\n')
        assert drop_rows(path, 1)
        assert rows_in(path) == [0]
    assert path.with_name("metrics.jsonl.damaged").read_text() == "hm\n[]\n"
    assert f"Row 2 of {path} is damaged" in caplog.text
