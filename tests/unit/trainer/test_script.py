"""The train files as scripts, as `torchrun` starts them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import prime_rl
from prime_rl import lifeline
from prime_rl.config.command import FINAL
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


FAILS = """
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ModelError
from prime_rl.trainer.script import main

def run(config):
    raise ModelError(f"no model {config.model.name}")

main("trainer", TrainerConfig, run)
"""

MEETING = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
TWO_RANKS = ("-m", "prime_rl.trainer.agent", "--nproc-per-node", "2", *MEETING)
"""Under torchrun as `rl` starts it, which ends all ranks when one has ended."""


def assert_told_once(done: subprocess.CompletedProcess[str], told: str, tmp_path: Path) -> None:
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(told)
    left = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert left - {"logs", "activity"} == {"configs"}, "the second rank may have come to log it, or not"


def test_what_all_ranks_find_wrong_is_told_once_and_without_a_traceback(start, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = start(tmp_path / "fails.py", "--model.name", "/none", "--max-steps", "1", front=TWO_RANKS)
    assert_told_once(done, "trainer: no model /none", tmp_path)


@pytest.mark.slow
def test_a_model_that_no_rank_finds_is_told_once_and_without_a_traceback(start, tmp_path):
    flags = ("--model.name", "/none", "--max-steps", "1", "--data.type", "fake")
    assert_told_once(start(SFT, *flags, front=TWO_RANKS), "sft: model '/none' is neither a local directory", tmp_path)


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
    processes = {}
    for ending in ("bug", "killed", "silent"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ENDING": ending}
        command = [*agent, *MEETING, str(directory / "ranks.py"), "--output-dir", ending]
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


@pytest.mark.parametrize(("flags", "code"), [((), FINAL), (("--recover",), 1)])
def test_a_model_that_does_not_fit_is_final_but_after_a_restart(tmp_path, monkeypatch, capsys, flags, code):
    def run(config: TrainerConfig) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(lifeline.VARIABLE, "a launcher")
    monkeypatch.setattr("prime_rl.trainer.script.begin", lambda name, config: None)
    with pytest.raises(SystemExit) as ended:
        main("trainer", TrainerConfig, run, ["--max-steps", "1", *flags])
    # A message is code 1, and Python prints it.
    assert (ended.value.code if isinstance(ended.value.code, int) else 1) == code
    assert "the GPU's memory is full" in f"{ended.value.code}{capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("flags", "is_refused", "is_left"),
    [
        ((), True, True),
        (("--dry-run",), True, True),
        (("--clean", "--dry-run"), False, True),
        (("--clean",), False, False),
    ],
)
def test_a_used_directory_is_refused_or_cleaned(tmp_path, monkeypatch, flags, is_refused, is_left):
    old, started = tmp_path / "outputs" / "weights" / "step_1", []
    old.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prime_rl.trainer.script.begin", lambda name, config: started.append(name))
    ended = pytest.raises(SystemExit, match=r"delete it with --clean") if is_refused else nullcontext()
    with ended:
        main("sft", SFTConfig, lambda config: started.append(config.max_steps), [*flags, "--max-steps", "1"])
    assert old.exists() == is_left
    assert started == (["sft", 1] if flags == ("--clean",) else [])


def test_a_process_without_a_log_file_writes_none(start, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = start(tmp_path / "fails.py", "--max-steps", "1", "--model.name", "/none", "--no-log.file")
    assert (done.returncode, said(done)[-1]) == (1, "trainer: no model /none")
    assert (tmp_path / "outputs" / "configs").exists()
    assert not (tmp_path / "outputs" / "logs").exists()


WRITES = """
import ctypes, os, signal, sys, time
from contextlib import closing
from pathlib import Path
import torch
from prime_rl import lifeline
from prime_rl.config.trainer import SFTConfig
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.script import main
from prime_rl.transport.manifest import draft_dir

signal.alarm(300)  # nothing of a test that fails stays
lifeline.GRACE_S = 1.0
final = Path("outputs/weights/step_1")

def tensors():
    yield "a", torch.ones(3)
    yield "b", torch.ones(3)
    if how == "half":
        time.sleep(60)

def write(snapshot):
    with draft_dir(final) as draft:
        for name, tensor in snapshot:
            (draft.directory / name).write_text(name)
            if how == "half":
                Path("writing").touch()
        Path("writing").touch()
        while not Path("go").exists():
            time.sleep(0.01)

class Slow:
    def __del__(self):
        Path("writing").touch()
        time.sleep(60)

def run(config):
    if os.environ.get("RANK") == "1":
        while not Path("writing").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lost":
        slow = Slow()
        del slow
        time.sleep(120)
    with closing(BackgroundWriter()) as writer:
        writer.start("weights/step_1", tensors(), write)
        if how == "stuck":
            library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            while True:  # at the second time for ever, in C
                library.pthread_mutex_lock(mutex)
        time.sleep(120)

how = sys.argv[1]
main("sft", SFTConfig, run, ["--max-steps", "2"])
"""


@pytest.fixture
def writing(tmp_path):
    """A process that is writing weights; `half`: that is still copying them; `stuck`: and whose loop is in C; `lost`:
    that writes nothing, and is where exceptions are lost."""
    started = []

    def start(how: str, front: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "writes.py").write_text(WRITES)
        command = [sys.executable, *front, "writes.py", how]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(process)
        deadline = time.monotonic() + 120
        while not (tmp_path / "writing").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_process_that_is_told_to_end_writes_the_weights_that_it_has_copied(writing, tmp_path, number, code):
    process = writing("whole")
    process.send_signal(number)
    await_line(process, "Waiting for weights/step_1 ")
    (tmp_path / "go").touch()
    assert process.wait(60) == code
    assert os.listdir(tmp_path / "outputs" / "weights") == ["step_1"]


def test_of_weights_that_are_half_copied_nothing_stays(writing, tmp_path):
    process = writing("half")
    (tmp_path / "go").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert os.listdir(tmp_path / "outputs" / "weights") == []


def test_a_second_signal_ends_it_at_once(writing, tmp_path):
    process = writing("whole")
    process.send_signal(signal.SIGINT)
    await_line(process, "Waiting for weights/step_1 ")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
    assert not (tmp_path / "outputs" / "weights" / "step_1").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_ends_though_the_exception_was_lost(writing, number, code):
    process = writing("lost")
    process.send_signal(number)
    assert process.wait(60) == code


def test_sigterm_that_comes_twice_hurries_nobody(writing, tmp_path):
    process = writing("whole")
    process.terminate()
    await_line(process, "Waiting for weights/step_1 ")
    process.terminate()
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert process.wait(60) == -signal.SIGTERM
    assert os.listdir(tmp_path / "outputs" / "weights") == ["step_1"]


def test_weights_are_written_although_the_launcher_was_killed(writing, tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        token = f"{launcher.pid}:{lifeline._started(launcher.pid)}"
        process = writing("whole", **{lifeline.VARIABLE: token})
        launcher.kill()
    await_line(process, "Waiting for weights/step_1 ")
    time.sleep(3)  # more than a process without weights is given
    (tmp_path / "go").touch()
    process.wait(60)
    assert os.listdir(tmp_path / "outputs" / "weights") == ["step_1"]


AGENT = """
import sys
from torch.distributed.elastic.multiprocessing.api import PContext
from prime_rl.trainer import agent

PContext.close.__defaults__ = (None, 1)
sys.exit(agent.main(sys.argv[1:]))
"""
"""Of torchrun's 30 s, one."""


def test_a_rank_that_failed_is_told_at_once_and_the_first_one_writes_its_weights_though_its_loop_is_stuck(
    writing, tmp_path
):
    (tmp_path / "agent.py").write_text(AGENT)
    process = writing("stuck", ("agent.py", "--nproc-per-node", "2", *MEETING))
    await_line(process, "trainer: rank 1 was killed by SIGKILL")
    assert os.listdir(tmp_path / "outputs" / "weights") != ["step_1"]
    time.sleep(3)
    (tmp_path / "go").touch()
    assert process.wait(60) == 1
    assert os.listdir(tmp_path / "outputs" / "weights") == ["step_1"]


def await_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr)


HANGS = """
import time
from contextlib import closing
from pathlib import Path
import torch
from prime_rl.config.trainer import SFTConfig
from prime_rl.models import hf
from prime_rl.trainer import writing
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.script import main

writing.TICK_S = writing.HANGING_S = 0.5
hf.write_file = lambda path, tensors: time.sleep(600)

def run(config):
    with closing(BackgroundWriter()) as writer:
        tensors = [("a", torch.ones(3))]
        writer.start("weights/step_1", tensors, lambda snapshot: hf.write_safetensors(snapshot, Path("outputs/draft")))
        writer.finish()

main("sft", SFTConfig, run, ["--max-steps", "2"])
"""


def test_a_disk_that_hangs_ends_the_process_in_words(start, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    done = start(tmp_path / "hangs.py")
    assert done.returncode == 1
    assert "its disk hangs" in said(done)[-1]
