import pytest

from prime_rl.config.help import help_text
from prime_rl.config.roots import RLConfig
from prime_rl.config.schema import all_keys
from prime_rl.errors import ConfigError


def test_the_top_level_is_short_and_leads_to_the_sections():
    text = help_text(RLConfig, "rl")
    assert "--max-steps INT  (default: None)" in text
    assert "--trainer.*" in text
    assert "--trainer.optim.lr" not in text
    assert "--help SECTION" in text


def test_a_section_shows_its_keys_with_defaults_and_documentation():
    text = help_text(RLConfig, "rl", "trainer.optim")
    assert "--trainer.optim.lr FLOAT  (default: 1e-06)" in text
    assert "Learning rate at its peak." in text


def test_an_unknown_section_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean trainer"):
        help_text(RLConfig, "rl", "trainr")


def test_keys_are_listed_depth_first():
    keys = list(all_keys(RLConfig))
    assert "trainer.optim.lr" in keys
    assert keys.index("trainer") < keys.index("trainer.model") < keys.index("trainer.model.name")
