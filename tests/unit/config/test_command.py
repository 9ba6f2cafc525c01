"""The front of every command, in this process: what is printed, written and refused."""

import errno
import json
import logging
from pathlib import Path

import pytest
from tests.doubles.disks import small_disk

from prime_rl import lifeline
from prime_rl.config.command import begin, run_command
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.config.writing import write_toml
from prime_rl.errors import FINAL, ConfigError, InferenceError, MemoryFull, NoServer
from prime_rl.logs import get_logger

FILE = "max_steps = 5\n\n[optim]\nlr = 2e-3\n"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.toml").write_text(FILE)


def trainer(*argv: str) -> list[TrainerConfig]:
    """The configurations that work was started with: one or none."""
    started: list[TrainerConfig] = []
    run_command("trainer", TrainerConfig, started.append, argv=argv)
    return started


def refusal(*argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        trainer(*argv)
    return str(caught.value)


def test_a_real_start_works_on_the_resolved_configuration():
    (config,) = trainer("@", "t.toml")
    assert config.max_steps == 5
    assert not Path("outputs").exists()  # recording it is the work's business


def test_a_dry_run_writes_the_configuration_and_starts_nothing(capsys):
    assert trainer("@", "t.toml", "--dry-run", "--output-dir", "out") == []
    assert capsys.readouterr().out == "trainer: wrote out/configs/trainer.toml\n"
    again = load(TrainerConfig, ["@", "out/configs/trainer.toml"], {})
    assert again == load(TrainerConfig, ["@", "t.toml", "--output-dir", "out"], {})


def test_a_dry_run_says_what_a_real_start_would_refuse(capsys):
    assert trainer("--dry-run", "--wandb") == []
    assert "a real start would refuse wandb (--wandb): needs monitors" in capsys.readouterr().err


def test_a_real_start_refuses_a_key_that_nothing_reads():
    text = refusal("@", "t.toml", "--model.ep", "4")
    assert "trainer: model.ep = 4 (--model.ep): needs mixtures" in text
    assert "--dry-run accepts" in text


def test_only_the_first_rank_of_torchrun_writes_and_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert trainer("@", "t.toml", "--dry-run") == []
    assert not Path("outputs").exists()
    assert capsys.readouterr() == ("", "")


def test_ranks_behind_the_first_record_nothing_and_log_warnings_to_files_of_their_own(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    root = logging.getLogger()
    before = root.handlers[:], root.level, get_logger().level
    begin("trainer", load(TrainerConfig, ["--output-dir", "out"], {}))
    try:
        get_logger().info("step 0")
        assert not Path("out").exists()
        get_logger().warning("look")
        assert Path("out/logs/trainer/rank_3.log").read_text().endswith(" WARNING trainer[3]   | look\n")
        begin("trainer", load(TrainerConfig, ["--output-dir", "silent", "--no-log.file"], {}))
        get_logger().warning("here")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers, root.level, get_logger().level = before
        logging.captureWarnings(False)
    assert [path.name for path in Path("out").iterdir()] == ["logs"]
    assert not Path("silent").exists()
    assert capsys.readouterr().err.endswith("trainer[3]   | here\n")


def test_a_dry_run_does_not_overwrite_the_configuration_of_a_finished_run():
    trainer("@", "t.toml", "--dry-run")
    Path("outputs/weights/step_1").mkdir(parents=True)
    trainer("@", "t.toml", "--dry-run")  # the same again is no loss
    assert "choose another directory" in refusal("@", "t.toml", "--optim.lr", "1", "--dry-run")
    assert load(TrainerConfig, ["@", "outputs/configs/trainer.toml"], {}).optim.lr == 2e-3


def test_clean_overwrites_the_configuration_too_and_is_not_written(capsys):
    def start(*argv: str) -> None:
        run_command("sft", SFTConfig, print, argv=[*argv, "--dry-run"])

    start()
    Path("outputs/weights/step_1").mkdir(parents=True)
    start("--clean", "--optim.lr", "1")
    assert load(SFTConfig, ["@", "outputs/configs/sft.toml"], {}).optim.lr == 1
    assert "clean" not in Path("outputs/configs/sft.toml").read_text()


def test_a_server_beside_a_finished_run_leaves_its_configuration_alone(capsys, monkeypatch):
    config = load(InferenceConfig, [], {})
    write_toml(config, Path("outputs/configs/inference.toml"))
    Path("outputs/weights/step_1").mkdir(parents=True)
    begin("inference", config.model_copy(update={"seed": 7}))
    assert "stays as the run here was made with" in capsys.readouterr().err
    monkeypatch.setenv(lifeline.VARIABLE, lifeline.launcher_token())
    begin("inference", config.model_copy(update={"seed": 7}))
    assert capsys.readouterr().err == "", "its launcher has recorded its configuration under another name"
    assert load(InferenceConfig, ["@", "outputs/configs/inference.toml"], {}).seed == 42
    monkeypatch.delenv(lifeline.VARIABLE)
    with pytest.raises(SystemExit, match="choose another directory"):
        run_command("inference", InferenceConfig, print, argv=["--seed", "7", "--dry-run"])


def test_a_run_directory_that_cannot_be_written_is_said_in_a_sentence():
    assert "cannot be written" in refusal("--output-dir", "t.toml", "--dry-run")


def test_a_read_only_directory_is_refused_before_anything_begins(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        (disk.root / "run" / "weights").mkdir(parents=True)
        disk.make_read_only()
        said = refusal("@", "t.toml", "--output-dir", str(disk.root / "run"))
    assert "disk/run cannot be written: the file system is read-only: choose an output_dir" in said


def test_a_directory_of_the_run_that_lies_on_a_read_only_disk_is_refused_too(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        disk.make_read_only()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "weights").symlink_to(disk.root)
        said = refusal("@", "t.toml", "--output-dir", str(tmp_path / "run"))
    assert "run/weights cannot be written: the file system is read-only" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left", "some/file"), "trainer: some/file: the disk is full ("),
        (OSError(errno.EMFILE, "Too many open files"), "the run cannot go on: this process has as many files"),
    ],
)
def test_what_the_machine_refuses_anywhere_ends_a_command_in_words(error, words):
    def work(config: TrainerConfig) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command("trainer", TrainerConfig, work, argv=["@", "t.toml"])
    assert words in str(caught.value)


def test_other_errors_of_the_system_keep_their_traceback():
    def work(config: TrainerConfig) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")

    with pytest.raises(FileNotFoundError):
        run_command("trainer", TrainerConfig, work, argv=["@", "t.toml"])


def test_explain_shows_a_key_wherever_it_stands(capsys):
    assert trainer("@", "t.toml", "--explain", "optim.lr", "--max-steps", "7") == []
    assert trainer("--explain=optim.lr", "@", "t.toml") == []
    assert capsys.readouterr().out.count("optim.lr = 0.002\n  from: t.toml:4\n") == 2


def test_explain_of_an_unknown_key_names_the_nearest():
    assert "did you mean optim.lr?" in refusal("--explain", "optim.lrr")


def test_explain_needs_a_key():
    assert "--explain needs a key" in refusal("--explain", "@", "t.toml")


def test_help_is_found_wherever_it_stands(capsys):
    assert trainer("@", "t.toml", "--help", "optim") == []
    assert "--optim.lr FLOAT >= 0  (default: 1e-06)" in capsys.readouterr().out


def test_an_error_of_the_work_is_shown_without_a_traceback_unless_debugging():
    def fail(config: TrainerConfig) -> None:
        load(TrainerConfig, ["@", "missing.toml"])

    with pytest.raises(SystemExit, match=r"trainer: missing\.toml: no such file"):
        run_command("trainer", TrainerConfig, fail, argv=[])
    with pytest.raises(ValueError, match="no such file"):
        run_command("trainer", TrainerConfig, fail, argv=["--log.level", "debug"])


@pytest.mark.parametrize("argv", [[], ["--log.level", "debug"]])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("optim.lr: too high"), FINAL),
        (InferenceError("nobody answers"), 1),
        (NoServer("nobody answers"), FINAL),
        (MemoryFull("no memory", is_final=True), FINAL),
        (MemoryFull("no memory", is_final=False), 1),
    ],
)
def test_a_process_of_rl_tells_by_its_exit_code_whether_a_restart_can_mend_it(monkeypatch, capsys, argv, error, code):
    def fail(config: TrainerConfig) -> None:
        raise error

    monkeypatch.setenv(lifeline.VARIABLE, lifeline.launcher_token())
    if argv and code == 1:
        with pytest.raises(type(error)):
            run_command("trainer", TrainerConfig, fail, argv=argv)
        return
    with pytest.raises(SystemExit) as caught:
        run_command("trainer", TrainerConfig, fail, argv=argv)
    said = f"trainer: {error}"
    assert caught.value.code == (FINAL if code == FINAL else said)
    if code == FINAL:
        printed = capsys.readouterr().err
        assert printed.endswith(f"{said}\n")
        assert ("Traceback" in printed) == bool(argv)


@pytest.mark.parametrize("argv", [["--optim.lr", "fast"], []])
def test_torchrun_is_told_the_reason_of_a_refusal_for_its_summary(monkeypatch, tmp_path, argv):
    def fail(config: TrainerConfig) -> None:
        raise ConfigError("optim.lr: too high")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as caught:
        run_command("trainer", TrainerConfig, fail, argv=argv)
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told.startswith("optim.lr: ")
    assert str(caught.value) == f"trainer: {told}"
