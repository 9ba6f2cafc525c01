"""What a dry run writes starts each process alone, and resolves to itself."""

import pytest

from tests.seeds.listed import COMMANDS

SAMPLE = ["000-L155", "002-L500", "003-L86", "004-L207", "002-L625", "002-L351", "003-L167", "000-L407"]


@pytest.mark.parametrize("at", SAMPLE)
def test_a_written_file_starts_its_process_alone_and_resolves_to_itself(at, dry_runs, shell):
    command = COMMANDS[at]
    first = dry_runs.of(command)
    for name in command.writes:
        path = first.directory / command.output_dir / "configs" / f"{name}.toml"
        directory = shell.directory()
        again = shell.run(f"uv run {name} @ {path} --dry-run", directory)
        assert again.status == 0, again.errors
        assert again.notices() == []
        assert (directory / command.output_dir / "configs" / f"{name}.toml").read_text() == path.read_text()
