"""A section of several types is of one at a time: a stronger source may choose another than a weaker one did."""

import pytest

from prime_rl.config.load import resolve
from prime_rl.config.optim import ConstantSchedulerConfig, CosineSchedulerConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError

LINEAR = """\
max_steps = 100

[trainer.scheduler]
type = "linear"
warmup_steps = 8
decay_steps = 30
"""


@pytest.fixture
def linear(tmp_path) -> str:
    path = tmp_path / "rl.toml"
    path.write_text(LINEAR)
    return str(path)


def test_another_type_leaves_out_what_it_does_not_know_of_weaker_sources_and_says_so(linear):
    resolved = resolve(RLConfig, ["@", linear, "--trainer.scheduler.type", "constant"], {})
    assert resolved.config.trainer.scheduler == ConstantSchedulerConfig()
    assert resolved.notices == [
        "trainer.scheduler.type is constant (--trainer.scheduler.type), which leaves out "
        f"warmup_steps ({linear}:5), decay_steps ({linear}:6)"
    ]


def test_what_the_other_type_knows_too_stays(linear):
    resolved = resolve(RLConfig, ["@", linear, "--trainer.scheduler.type", "cosine"], {})
    assert resolved.config.trainer.scheduler == CosineSchedulerConfig(warmup_steps=8)
    assert resolved.notices == [
        f"trainer.scheduler.type is cosine (--trainer.scheduler.type), which leaves out decay_steps ({linear}:6)"
    ]


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--trainer.scheduler.type", "constant", "--trainer.scheduler.min-lr", "1"], "min_lr"),
        (["--trainer.scheduler.type", "cosine", "--trainer.scheduler.decay-steps", "1"], "decay_steps"),
    ],
)
def test_what_as_strong_a_source_says_of_another_type_is_a_mistake(linear, argv, key):
    with pytest.raises(ConfigError, match=rf"trainer\.scheduler\.{key} \(--.*\) is a key of"):
        resolve(RLConfig, ["@", linear, *argv], {})


def test_a_file_is_stronger_than_a_variable_and_a_flag_than_both(linear):
    variables = {"PRIME_TRAINER__SCHEDULER__MIN_LR": "0.1", "PRIME_TRAINER__OPTIM__MOMENTUM": "0.5"}
    resolved = resolve(RLConfig, ["@", linear, "--trainer.optim.type", "adamw"], variables)
    assert resolved.config.trainer.scheduler.min_lr == 0.1
    assert resolved.config.trainer.optim.type == "adamw"
    with pytest.raises(ConfigError, match=r"trainer\.optim\.momentum \(variable PRIME_.*\) is a key of .*sgd"):
        resolve(RLConfig, ["@", linear], variables)


def test_a_shared_type_is_as_strong_as_the_source_that_set_it(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text('[weight_broadcast]\ntype = "nccl"\n[trainer.weight_broadcast]\ntimeout = 5\n')
    resolved = resolve(RLConfig, ["@", str(path), "--weight-broadcast.type", "filesystem"], {})
    assert resolved.config.trainer.weight_broadcast.type == "filesystem"
    assert f"timeout ({path}:4)" in resolved.notices[0]
    path.write_text('[weight_broadcast]\ntype = "filesystem"\n[trainer.weight_broadcast]\ntimeout = 5\n')
    with pytest.raises(ConfigError, match=r"timeout \(.*:4\) is a key of trainer\.weight_broadcast\.type nccl"):
        resolve(RLConfig, ["@", str(path)], {})


def test_entries_of_a_list_change_their_type_one_by_one(tmp_path):
    path = tmp_path / "o.toml"
    path.write_text("[[filters]]\ntype = 'gibberish'\nenforce = true\ntoken_id_threshold = 9\n")
    resolved = resolve(OrchestratorConfig, ["@", str(path), "--filters.0.type", "repetition"], {})
    (only,) = resolved.config.filters
    assert (only.type, only.enforce) == ("repetition", True)
    assert f"leaves out token_id_threshold ({path}:4)" in resolved.notices[0]


def test_a_section_without_a_type_is_of_the_default_type():
    assert resolve(TrainerConfig, ["--optim.betas1", "0.5"], {}).config.optim.type == "adamw"
