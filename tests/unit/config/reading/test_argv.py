import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.load import load
from prime_rl.config.reading.argv import parse_argv
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError


def complaint(root, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, argv, {})
    return str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--steps", "10,50,100"],
        ["--steps", "10", "50", "100"],
        ["--steps", "[10, 50, 100]"],
        ["--steps=10,50,100"],
        ["--steps=[10,50,100]"],
        ["--steps", "10, 50, 100"],
        ["--steps", "10,50", "100"],
    ],
)
def test_a_list_is_written_with_commas_with_spaces_or_as_json(argv):
    assert load(EvalConfig, [*argv, "--weights-dir", "w"], {}).steps == (10, 50, 100)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--data.fake", "{'micro_batch_size': 8, 'batch_size': 128, 'seq_len': 128}"], (8, 128, 128)),
        (["--data.fake", '{"micro-batch-size": 8, "batch_size": 128, "seq_len": 128}'], (8, 128, 128)),
        (["--data.fake.micro_batch_size", "8", "--data.fake.batch-size", "16"], (8, 16, None)),
        (["--data.fake={'batch_size': 4}", "--data.fake", "{'seq_len': 9}"], (1, 4, 9)),
        (["--data.fake"], (1, 2, None)),
    ],
)
def test_a_table_is_written_as_json_as_python_or_key_by_key_and_merges(argv, expected):
    fake = load(TrainerConfig, argv, {}).data.fake
    assert fake is not None
    assert (fake.micro_batch_size, fake.batch_size, fake.seq_len) == expected


def test_an_optional_section_is_switched_on_by_its_bare_flag_and_off_by_its_negation(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('ckpt = "None"\n[wandb]\nproject = "p"\n[wandb.log_extras]\n')
    config = load(TrainerConfig, ["@", str(path)], {})
    assert config.ckpt is None
    assert config.wandb is not None
    config = load(TrainerConfig, ["@", str(path), "--ckpt", "--no-wandb"], {})
    assert config.ckpt is not None
    assert config.wandb is None
    assert load(TrainerConfig, ["--ckpt.interval", "5", "--no-ckpt"], {}).ckpt is None
    config = load(TrainerConfig, ["--no-ckpt", "--ckpt.interval", "5"], {})
    assert config.ckpt is not None
    assert load(TrainerConfig, ["@", str(path), "--wandb", "None"], {}).wandb is None


@pytest.mark.parametrize(
    "flag",
    [
        "--no-trainer.wandb.log-extras.distributions",
        "--trainer.wandb.log-extras.no-distributions",
        "--trainer.wandb.log-extras.distributions=false",
    ],
)
def test_a_flag_is_negated_on_the_whole_path_or_on_its_last_part(flag):
    config = load(RLConfig, ["--wandb", flag], {})
    assert config.trainer.wandb is not None
    assert config.trainer.wandb.log_extras is not None
    assert not config.trainer.wandb.log_extras.distributions


def test_a_flag_takes_the_word_true_or_false_and_no_other():
    assert not load(RLConfig, ["--clean", "false"], {}).clean
    assert load(RLConfig, ["--no-clean", "--clean", "True"], {}).clean
    assert "'sure' after --clean: expected --key value" in complaint(RLConfig, "--clean", "sure")


def test_a_file_behind_a_flag_without_value_is_a_file_of_its_own(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text("max_steps = 3\n")
    config = load(RLConfig, ["--clean", "@", str(path)], {})
    assert (config.clean, config.max_steps) == (True, 3)


def test_a_file_is_read_into_any_section_or_free_table(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("interval = 7\n")
    config = load(TrainerConfig, ["--ckpt", f"@{path}"], {})
    assert config.ckpt is not None
    assert config.ckpt.interval == 7
    config = load(RLConfig, ["--orchestrator.env.args", "@", str(path), "--orchestrator.eval", "@", str(path)], {})
    assert config.orchestrator.env[0].args == {"interval": 7}
    assert config.orchestrator.eval is not None
    assert config.orchestrator.eval.interval == 7
    text = complaint(RLConfig, "--model.name", "@", str(path))
    assert "--model.name: needs a value" in text
    assert "--model.name=@..." in text
    assert load(RLConfig, ["--model.name=@x"], {}).model.name == "@x"
    assert "trianer: no such key (--trianer); did you mean trainer?" in complaint(RLConfig, "--trianer", "@", str(path))


def test_a_file_for_the_whole_command_behind_a_switch_is_answered_with_the_right_order(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("[optim]\nlr = 1.0\n[model]\nseq-len = 64\n")
    assert f"write: @ {path} --bench" in complaint(TrainerConfig, "--bench", "@", str(path))
    assert load(TrainerConfig, ["@", str(path), "--bench"], {}).bench is not None
    path.write_text("output_json = 'x'\n[optim]\n")
    assert "bench.optim: no such key" in complaint(TrainerConfig, "--bench", "@", str(path))


def test_values_may_hold_equal_signs_and_begin_with_a_minus():
    assert load(RLConfig, ["--model.name=a=b"], {}).model.name == "a=b"
    assert load(RLConfig, ["--model.name", "a=b"], {}).model.name == "a=b"
    assert load(RLConfig, ["--model.name=--x"], {}).model.name == "--x"
    config = load(RLConfig, ["--ckpt.resume-step", "-1"], {})
    assert config.ckpt is not None
    assert config.ckpt.resume_step == -1
    assert load(EvalConfig, ["--num-examples", "-1", "--env.0.num-examples=-1"], {}).env[0].num_examples == -1


def test_the_last_of_two_equal_flags_counts():
    assert load(RLConfig, ["--max-steps", "3", "--max-steps", "4"], {}).max_steps == 4
    assert load(SFTConfig, ["--data.splits", "a,b", "--data.splits", "c"], {}).data.splits == ("c",)


def test_the_word_none_is_null():
    assert load(RLConfig, ["--max-steps", "3", "--max-steps", "None"], {}).max_steps is None
    assert load(RLConfig, ["--max-steps", "3", "--no-max-steps"], {}).max_steps is None
    assert load(SFTConfig, ["--data.splits", "a", "--data.splits", "None"], {}).data.splits is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-steps"], "--max-steps: needs a value, like --max-steps ..."),
        (["--max-steps", "--clean"], "--max-steps: needs a value"),
        (["--orchestrator.env.args"], "--orchestrator.env.args: needs a value"),
        (["--"], "'--': expected --key value or @ file.toml"),
        (["--model.name", "--", "--clean"], "--model.name: needs a value"),
        (["--max-steps", "3", "4"], "'4' after --max-steps: expected --key value"),
        (["-x"], "'-x': expected --key value"),
        (["@"], "'@': must be followed by a TOML file"),
        (["@", "--clean"], "'@': must be followed by a TOML file"),
        (["--trainer", "@"], "'@' after --trainer: must be followed by a TOML file"),
        (["--no-such-thing"], "no_such_thing: no such key (--no-such-thing)"),
        (["--no-claen"], "did you mean clean?"),
        (["--orchestrator.env.99999999999999999999.id", "x"], "no such key"),
        (["--orchestrator.env.2.id", "x"], "a new one would be 0"),
        (["--trainer.optim", "{'lr': }"], "--trainer.optim: \"{'lr': }\" is neither JSON"),
    ],
)
def test_a_word_that_cannot_be_read_is_answered_with_how_to_write_it(argv, expected):
    assert expected in complaint(RLConfig, *argv)


def test_flags_and_files_keep_their_own_order_and_places(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("max_steps = 1\n")
    command = parse_argv(RLConfig, ["--max-steps", "2", f"@{path}", "--no-clean"])
    assert [(s.path, s.value, s.origin) for s in command.files] == [(("max_steps",), 1, f"{path}:1")]
    assert [(s.path, s.value, s.origin) for s in command.flags] == [
        (("max_steps",), "2", "--max-steps"),
        (("clean",), False, "--no-clean"),
    ]
