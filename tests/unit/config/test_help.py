import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.help import help_text
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.schema import all_keys
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError


def test_the_top_level_is_short_and_leads_to_the_sections():
    text = help_text(RLConfig, "rl")
    assert "--max-steps INT >= 1  (default: None)" in text
    assert "--trainer.*" in text
    assert "--trainer.optim.lr" not in text
    assert "--help SECTION" in text


def test_a_section_shows_its_keys_with_defaults_and_documentation():
    text = help_text(RLConfig, "rl", "trainer.optim")
    assert "--trainer.optim.lr FLOAT >= 0  (default: 1e-06)" in text
    assert "Learning rate at its peak." in text


@pytest.mark.parametrize(
    ("root", "key", "shown"),
    [
        pytest.param(TrainerConfig, "log.level", "debug|info|warning|error  (default: info)", id="a choice"),
        pytest.param(TrainerConfig, "log.file", "BOOL  (default: true)", id="a switch"),
        pytest.param(TrainerConfig, "optim.betas1", "FLOAT >= 0 and < 1  (default: 0.9)", id="both ends"),
        pytest.param(TrainerConfig, "model.lora.dropout", "FLOAT 0 to 1  (default: 0.0)", id="from and to"),
        pytest.param(TrainerConfig, "model.lora.modules_to_save", "STR,...  (default: [])", id="an empty list"),
        pytest.param(OrchestratorConfig, "buffer.hash_keys", "STR,...  (default: task,prompt)", id="a list"),
        pytest.param(EvalConfig, "num_examples", "INT >= -1  (default: -1)", id="a named type"),
        pytest.param(EvalConfig, "env.num_examples", "INT >= -1  (default: None)", id="a named type or None"),
        pytest.param(OrchestratorConfig, "env.args", "TABLE  (default: {})", id="a free table"),
        pytest.param(TrainerConfig, "heartbeat.url", "STR  (default: must be given)", id="no default"),
    ],
)
def test_a_key_shows_its_type_range_and_default_as_the_command_line_takes_them(root, key, shown):
    assert f"--{key.replace('_', '-')} {shown}" in help_text(root, "x", key)


def test_what_waits_for_something_says_so_in_the_list_the_section_and_the_key():
    wandb, later = "--wandb.*  ", "Later: comes with monitors."
    assert any(wandb in line and later in line for line in help_text(TrainerConfig, "trainer").splitlines())
    model = help_text(TrainerConfig, "trainer", "model").splitlines()
    assert any("Later: other values come with mixtures of experts" in line for line in model)
    assert later in help_text(TrainerConfig, "trainer", "wandb")
    assert later in help_text(TrainerConfig, "trainer", "wandb.project")
    assert "Later" not in help_text(TrainerConfig, "trainer", "scheduler")


def test_a_section_of_several_types_shows_each_with_its_keys():
    adamw, sgd, muon = help_text(TrainerConfig, "trainer", "optim").split("\ntype ")[1:]
    assert [text.partition(":")[0] for text in (adamw, sgd, muon)] == ["adamw", "sgd", "muon"]
    assert "--optim.betas1" in adamw
    assert "--optim.momentum" in sgd
    assert "--optim.mu" in muon


def test_an_unknown_section_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean trainer"):
        help_text(RLConfig, "rl", "trainr")


def test_keys_are_listed_depth_first():
    keys = list(all_keys(RLConfig))
    assert "trainer.optim.lr" in keys
    assert keys.index("trainer") < keys.index("trainer.model") < keys.index("trainer.model.name")
