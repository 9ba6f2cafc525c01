"""The train files as scripts, as `torchrun` starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prime_rl
from prime_rl.config.load import load
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer.script import main

TRAINER = Path(prime_rl.__file__).parent / "trainer"
RL, SFT = TRAINER / "rl" / "train.py", TRAINER / "sft" / "train.py"


@pytest.fixture
def start(tmp_path):
    """Run a script to its end in an empty directory, as one rank of a world."""

    def run(
        script: Path, *flags: str, rank: int = 0, world_size: int = 1, front: tuple[str, ...] = ("-X", "importtime")
    ) -> subprocess.CompletedProcess[str]:
        search_path = os.pathsep.join([str(TRAINER.parents[1]), *sys.path])
        environment = os.environ | {"PYTHONPATH": search_path, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, *front, str(script), *flags]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize(("script", "name", "root"), [(RL, "trainer", TrainerConfig), (SFT, "sft", SFTConfig)])
def test_a_dry_run_writes_the_configuration_under_the_command_s_name_and_imports_no_torch(
    start, tmp_path, script, name, root
):
    done = start(script, "--dry-run", "--optim.lr", "0.5")
    assert done.returncode == 0, said(done)
    assert done.stdout == f"{name}: wrote outputs/configs/{name}.toml\n"
    assert load(root, ["@", str(tmp_path / "outputs" / "configs" / f"{name}.toml")], {}).optim.lr == 0.5
    assert " prime_rl.trainer.script\n" in done.stderr
    assert " torch\n" not in done.stderr


def test_of_several_ranks_the_first_speaks_and_writes(start, tmp_path):
    done = start(RL, "--dry-run", "--async-level", "3", rank=1, world_size=2)
    assert (done.returncode, done.stdout, said(done)) == (0, "", [])
    assert not (tmp_path / "outputs").exists()
    done = start(RL, "--dry-run", "--async-level", "3", rank=0, world_size=2)
    assert (tmp_path / "outputs" / "configs" / "trainer.toml").exists()
    assert len(said(done)) == 1
    assert "--max-async-level" in said(done)[0]


def test_what_all_ranks_find_wrong_is_told_once_and_without_a_traceback(start, tmp_path):
    """Under torchrun as `rl` starts it, which ends all ranks when one has ended."""
    flags = ("--model.name", "/none", "--max-steps", "1", "--data.type", "fake")
    done = start(SFT, *flags, front=("-m", "prime_rl.trainer.agent", "--nproc-per-node", "2"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("sft: model '/none' is neither a local directory")
    left = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert left - {"logs"} == {"configs"}, "the second rank may have come to log it, or not"


RANKS = """
import os, signal, sys
import torch.distributed as dist
from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer import script

script.FIRST_RANK_S, script.ECHO_S = 0.5, 2.0

def run(config):
    dist.init_process_group("gloo")
    ending = os.environ["ENDING"] if dist.get_rank() == 1 else ""
    dist.barrier()
    if ending == "bug":
        {}["key"]
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "silent":
        os._exit(0)
    dist.barrier()

script.main("trainer", TrainerConfig, run)
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How the second of two ranks ended -> exit code, lines on standard error, and lines of that rank's own log."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "ranks.py").write_text(RANKS)
    agent = [sys.executable, "-m", "prime_rl.trainer.agent", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    processes = {}
    for ending in ("bug", "killed", "silent"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ENDING": ending}
        command = [*agent, *meeting, str(directory / "ranks.py"), "--output-dir", ending]
        processes[ending] = subprocess.Popen(
            command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    found = {}
    for ending, process in processes.items():
        _, errors = process.communicate(timeout=120)
        log = RunPaths(directory / ending).rank_log("trainer", 1)
        found[ending] = process.returncode, errors.splitlines(), log.read_text().splitlines() if log.exists() else []
    return found


def test_the_rank_that_failed_gives_the_reason_and_the_one_that_lost_it_is_silent(endings):
    code, errors, log = endings["bug"]
    assert code == 1
    assert errors.count("KeyError: 'key'") == errors.count("Traceback (most recent call last):") == 1
    assert errors[-1] == "trainer (rank 1): KeyError: 'key'"
    assert "KeyError: 'key'" in log


def test_a_rank_that_is_killed_is_named_by_who_started_it(endings):
    code, errors, _ = endings["killed"]
    assert (code, len(errors)) == (1, 1)
    assert errors[0].startswith("trainer: rank 1 was killed by SIGKILL")


def test_a_rank_that_is_gone_without_a_word_is_missed_by_another(endings):
    code, errors, _ = endings["silent"]
    assert (code, len(errors)) == (1, 1)
    assert errors[0].startswith("trainer: lost the other ranks: one of them has ended")
    assert errors[0].count("[") <= 1, "gloo's place in its source is left out"


def test_a_real_start_trains_logs_and_records_under_the_command_s_name(start, tmp_path, model_dir):
    flags = ("--model.name", str(model_dir), "--data.type", "fake", "--data.batch-size", "2", "--max-steps", "2")
    done = start(SFT, *flags, "--device", "cpu", "--log.json-logging")
    assert done.returncode == 0, said(done)
    paths = RunPaths(tmp_path / "outputs")
    assert [row["step"] for row in read_metrics(paths.metrics("trainer"))] == [0, 1]
    assert load(SFTConfig, ["@", str(paths.config("sft"))], {}).max_steps == 2
    assert '"message": "Step 1 | Time: ' in paths.log("sft").read_text()


def test_full_memory_of_a_gpu_is_answered_with_what_takes_less(tmp_path, monkeypatch):
    def run(config: TrainerConfig) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prime_rl.trainer.script.begin", lambda name, config: None)
    with pytest.raises(
        SystemExit, match=r"trainer: the GPU's memory is full\..*model\.ac.*Tried to allocate 20\.00 GiB"
    ):
        main("trainer", TrainerConfig, run, ["--max-steps", "1"])


def test_a_used_directory_is_refused_or_cleaned(start, tmp_path):
    old = tmp_path / "outputs" / "weights" / "step_1"
    for flags, is_left in (((), True), (("--dry-run",), True), (("--clean", "--dry-run"), True), (("--clean",), False)):
        old.mkdir(parents=True, exist_ok=True)
        done = start(SFT, *flags, "--model.name", "/none", "--max-steps", "1")
        assert old.exists() == is_left, flags
        assert ("delete that run with --clean" in done.stderr) == ("--clean" not in flags)


def test_a_process_without_a_log_file_writes_none(start, tmp_path):
    done = start(RL, "--data.fake", "--max-steps", "1", "--model.name", str(tmp_path / "none"), "--no-log.file")
    assert done.returncode == 1
    assert said(done)[-1].startswith(f"trainer: model '{tmp_path / 'none'}' is neither a local directory")
    assert not (tmp_path / "outputs" / "logs").exists()
