"""The documents' example of precedence: five sources of a model's name, what is left when one after another is gone."""

import pytest

from tests.seeds.shell import Shell

STEPS = {
    "the command line": (
        "PRIME_MODEL__NAME=Qwen/Qwen3-4B uv run inference @qwen8b.toml @qwen14b.toml --model.name Qwen/Qwen3-32B",
        "Qwen/Qwen3-32B",
    ),
    "the last file": (
        "PRIME_MODEL__NAME=Qwen/Qwen3-4B uv run inference @qwen8b.toml @qwen14b.toml",
        "Qwen/Qwen-14B",
    ),
    "the first file": ("PRIME_MODEL__NAME=Qwen/Qwen3-4B uv run inference @qwen8b.toml", "Qwen/Qwen3-8B"),
    "the environment": ("PRIME_MODEL__NAME=Qwen/Qwen3-4B uv run inference", "Qwen/Qwen3-4B"),
    "the default": ("uv run inference", "Qwen/Qwen3-0.6B"),
}


@pytest.mark.parametrize(("command", "name"), STEPS.values(), ids=STEPS)
def test_the_strongest_source_that_is_there_names_the_model(command, name, shell: Shell):
    outcome = shell.run(f"{command} --dry-run", shell.directory())
    assert outcome.status == 0, outcome.errors
    assert outcome.written("outputs")["inference"]["model"]["name"] == name
