"""A disk that is full, or read-only, is said in words; what was complete stays whole, and with room the run goes on.

The disks are real ones of a few MiB in memory. They are filled when a step has appeared on them, and kept full until
the run has ended.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, drafts
from prime_rl.transport.manifest import complete_steps, verify
from tests.chaos import endstate
from tests.chaos.kills import Ended, tiny
from tests.doubles.disks import Disk, small_disk
from tests.integration.conftest import MODEL, ROOT, command

MIB: Final = 48
"""Of a disk with a whole run."""
STEPS: Final = 8
LIMIT_S: Final = 240
POLL_S: Final = 0.02
COMMANDS: Final = {
    "rl": ("--model.name", MODEL),
    "sft": ("@", "configs/debug/sft.toml"),
    "trainer": ("@", "configs/debug/train.toml"),
    "orchestrator": ("--model.name", MODEL),
    "inference": ("--model.name", MODEL),
    "eval": ("@", "examples/reverse_text_cpu/eval.toml"),
}


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("read-only") / "disk", mib=1) as disk:
        disk.make_read_only()
        yield disk.root


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_begins_in_a_directory_that_is_read_only(name, read_only):
    argv = command(name, *COMMANDS[name], "--output-dir", str(read_only / "run"))
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    said = f"{name}: {read_only}/run cannot be written: the file system is read-only: choose an output_dir that"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


class Begun:
    """A command that runs, with what it says in a file beside its disk."""

    def __init__(self, argv: list[str], out: Path) -> None:
        self._out = out
        with out.open("wb") as file:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        self._end = time.monotonic() + LIMIT_S

    @property
    def said(self) -> str:
        return self._out.read_text()

    def await_step(self, root: Path, step: int) -> None:
        """Until `root` holds a complete step as new as that."""
        while not any(found >= step for found in complete_steps(root)):
            assert self.process.poll() is None, self.said
            self._tick(f"{root}/step_{step}")

    def await_end(self, disk: Disk | None = None) -> int:
        """The exit code. Until then the disk is kept full: what the process removes makes no room."""
        while self.process.poll() is None:
            if disk is not None:
                disk.fill()
            self._tick("the end")
        return self.process.returncode

    def _tick(self, what: str) -> None:
        assert time.monotonic() < self._end, f"waited {LIMIT_S} s for {what}:\n{self.said}"
        time.sleep(POLL_S)


@contextmanager
def begun(argv: list[str], out: Path) -> Iterator[Begun]:
    one = Begun(argv, out)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def assert_whole(*roots: Path) -> None:
    """Nothing under a final name is damaged, and nothing else is left."""
    for root in roots:
        for directory in root.glob("step_*"):
            verify(directory)
        assert drafts(root) == []


@pytest.mark.parametrize(("name", "config"), [("trainer", "train"), pytest.param("sft", "sft", marks=pytest.mark.slow)])
def test_a_trainer_whose_disk_fills_up_ends_in_words_and_keeps_the_weights_that_it_has(tmp_path, name, config):
    with small_disk(tmp_path / "run", mib=MIB) as disk:
        paths = RunPaths(disk.root)
        slowly = ("--max-steps", "1000", "--debug.min-step-time", "0.2", "--weights.interval", "1")
        argv = command(name, "@", f"configs/debug/{config}.toml", *slowly, "--output-dir", str(disk.root))
        with begun(argv, tmp_path / "out") as one:
            one.await_step(paths.weights, 2)
            assert one.await_end(disk) == 1
            last = one.said.splitlines()[-1]
        assert last.startswith(f"{name}: cannot write {paths.weights}/step_"), one.said
        assert "the disk is full (0.0 of 48.0 MiB are free): free some of it, or choose an output_dir on" in last
        assert last.endswith("then start the same command again, or resume from the last checkpoint")
        assert "Traceback" not in one.said
        assert set(complete_steps(paths.weights)) >= {1, 2}
        assert_whole(paths.weights)
        rows = read_metrics(paths.metrics("trainer"))
        assert [row["step"] for row in rows] == list(range(len(rows)))


def test_a_disk_that_fills_up_with_checkpoints_leaves_those_before_and_training_is_resumed_from_them(tmp_path):
    paths = RunPaths(tmp_path / "run")
    rest = ("--debug.min-step-time", "0.2", "--output-dir", str(tmp_path / "run"))
    argv = command("sft", "@", "configs/debug/sft.toml", "--ckpt.interval", "1", *rest)
    with small_disk(paths.checkpoints, mib=MIB) as disk:
        with begun([*argv, "--max-steps", "1000"], tmp_path / "out") as one:
            one.await_step(paths.checkpoints, 2)
            assert one.await_end(disk) == 1
            last = one.said.splitlines()[-1]
        assert last.startswith(f"sft: cannot write {paths.checkpoints}/step_"), one.said
        assert ": the disk is full (0.0 of 48.0 MiB are free): free some of it, or choose an output_dir on" in last
        assert "Traceback" not in one.said
        assert_whole(paths.checkpoints, paths.weights)
        newest = complete_steps(paths.checkpoints)[-1]
        assert newest >= 2
        disk.free()
        again = [*argv, "--ckpt.resume-step", "-1", "--max-steps", str(newest + 2)]
        with begun(again, tmp_path / "again") as one:
            assert one.await_end() == 0, one.said
        assert_whole(paths.checkpoints, paths.weights)
        assert complete_steps(paths.checkpoints)[-1] == newest + 2
        assert [row["step"] for row in read_metrics(paths.metrics("trainer"))] == list(range(newest + 2))


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize("place", ["rollouts", "weights"])
def test_a_run_whose_disk_fills_up_ends_in_words_and_goes_on_once_there_is_room(tmp_path, free_port, place):
    paths = RunPaths(tmp_path / "rl")
    argv = tiny(tmp_path, port=free_port, max_steps=STEPS)
    with small_disk(tmp_path / "rl" / place, mib=16) as disk:
        with begun(argv, tmp_path / "first.out") as first:
            first.await_step(disk.root, 2)
            assert first.await_end(disk) == 1
        culprit = "orchestrator" if place == "rollouts" else "trainer"
        assert f"rl: {culprit} ended with exit code 3: cannot write {disk.root}/step_" in first.said
        assert "the disk is full (0.0 of 16.0 MiB are free): free some of it" in first.said
        assert "it is started again" not in first.said
        assert "Traceback" not in first.said
        assert_whole(paths.rollouts, paths.weights)
        before = complete_steps(paths.rollouts)
        disk.free()
        with begun(argv, tmp_path / "rl.out") as again:
            code = again.await_end()
        endstate.check(Ended(code=code, seconds=0, shots=[]), paths, steps=STEPS)
        assert before[-1] < STEPS


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_a_run_with_all_its_files_on_a_disk_that_fills_up_ends_in_words_and_goes_on(tmp_path, free_port):
    paths = RunPaths(tmp_path / "rl")
    argv = tiny(tmp_path, port=free_port, max_steps=STEPS)
    with small_disk(tmp_path / "rl", mib=MIB) as disk:
        with begun(argv, tmp_path / "first.out") as first:
            first.await_step(paths.weights, 2)
            assert first.await_end(disk) == 1
        assert "Traceback" not in first.said
        assert "the disk is full (0.0 of 48.0 MiB are free): free some of it" in first.said
        assert_whole(paths.rollouts, paths.weights)
        disk.free()
        with begun(argv, tmp_path / "rl.out") as again:
            code = again.await_end()
        endstate.check(Ended(code=code, seconds=0, shots=[]), paths, steps=STEPS)
