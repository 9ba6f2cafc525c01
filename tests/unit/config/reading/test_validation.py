"""What pydantic would be lax about: truth values for numbers, and numbers without end."""

from pathlib import Path

import pytest

from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError


def refusal(root, directory: Path, text: str) -> str:
    (directory / "c.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(root, ["@", str(directory / "c.toml")], {})
    return str(caught.value).replace(str(directory / "c.toml"), "c.toml")


@pytest.mark.parametrize(
    ("root", "text", "expected"),
    [
        (RLConfig, "max_steps = true", "max_steps: must be a whole number, got 'true' (c.toml:1)"),
        (RLConfig, "trainer_gpu_ids = [true]", "trainer_gpu_ids.0: must be a whole number, got 'true' (c.toml:1)"),
        (TrainerConfig, "[optim]\nlr = false", "optim.lr: must be a number, got 'false' (c.toml:2)"),
        (
            TrainerConfig,
            "[model]\nfused_lm_head_chunk_size = true",
            "model.fused_lm_head_chunk_size: must be a whole number or auto or disabled, got 'true' (c.toml:2)",
        ),
        (SFTConfig, "[data]\nprobabilities = [1.0, true]", "data.probabilities.1: must be a number, got 'true'"),
        (
            OrchestratorConfig,
            "[[filters]]\ntype = 'repetition'\nwindow = true",
            "filters.0.window: must be a whole number, got 'true' (c.toml:3)",
        ),
    ],
)
def test_a_truth_value_is_no_number(root, text, expected, tmp_path):
    assert expected in refusal(root, tmp_path, text)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_has_an_end(number, tmp_path):
    expected = f"optim.lr: must be a finite number, got {number} (c.toml:1)"
    assert refusal(TrainerConfig, tmp_path, f"optim.lr = {number}") == expected
    with pytest.raises(ConfigError, match=f"optim.lr: must be a finite number, got '{number}' "):
        load(TrainerConfig, [f"--optim.lr={number}"], {})


def test_numbers_and_truth_values_may_be_text(tmp_path):
    (tmp_path / "c.toml").write_text('max_steps = "3"\nclean = "true"\n[trainer.optim]\nlr = "1e-3"\n')
    config = load(RLConfig, ["@", str(tmp_path / "c.toml"), "--trainer-gpu-ids", "1,2"], {"PRIME_SEED": "7"})
    assert (config.max_steps, config.clean, config.trainer.optim.lr) == (3, True, 1e-3)
    assert (config.trainer_gpu_ids, config.seed) == ((1, 2), 7)


def test_free_tables_hold_truth_values_and_infinities(tmp_path):
    (tmp_path / "c.toml").write_text("[[env]]\nargs = { a = true, b = [inf, true] }\n")
    args = load(OrchestratorConfig, ["@", str(tmp_path / "c.toml")], {}).env[0].args
    assert args == {"a": True, "b": [float("inf"), True]}


def test_of_many_complaints_the_first_are_shown_and_the_rest_counted():
    argv = [
        f"--optim.{key}=x" for key in ("lr", "weight_decay", "max_norm", "betas1", "betas2", "mu", "type", "momentum")
    ]
    with pytest.raises(ConfigError) as caught:
        load(TrainerConfig, ["--max-steps=x", "--seed=x", *argv, *(f"--model.{k}=x" for k in ("tp", "cp", "ep"))], {})
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "max_steps: must be a whole number, got 'x' (--max-steps)",
        "seed: must be a whole number, got 'x' (--seed)",
    ]
    assert len(lines) <= 9
