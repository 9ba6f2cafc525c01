"""What a dry run writes starts each process alone, and resolves to itself."""

import pytest

from prime_rl.config.load import resolve
from prime_rl.config.reference import ROOTS
from prime_rl.config.writing import to_toml
from tests.seeds.listed import COMMANDS

FILES = [(at, name) for at, command in COMMANDS.items() for name in command.writes]
SAMPLE = [("002-L500", "rl"), ("004-L207", "trainer"), ("003-L86", "orchestrator"), ("003-L167", "inference")]
SAMPLE += [("002-L625", "sft"), ("002-L351", "eval")]


@pytest.mark.parametrize(("at", "name"), FILES)
def test_a_written_file_resolves_to_itself_and_holds_no_older_spelling(at, name, dry_runs):
    path = dry_runs.of(COMMANDS[at]).configs(COMMANDS[at].output_dir) / f"{name}.toml"
    again = resolve(ROOTS[name], ["@", str(path)], {})
    assert to_toml(again.config) == path.read_text()
    assert again.notices == []


@pytest.mark.parametrize(("at", "name"), SAMPLE)
def test_a_written_file_starts_its_process_alone(at, name, dry_runs, shell):
    output_dir = COMMANDS[at].output_dir
    path = dry_runs.of(COMMANDS[at]).configs(output_dir) / f"{name}.toml"
    again = shell.run(f"uv run {name} @ {path} --dry-run", shell.directory())
    assert again.status == 0, again.errors
    assert (again.configs(output_dir) / f"{name}.toml").read_text() == path.read_text()
