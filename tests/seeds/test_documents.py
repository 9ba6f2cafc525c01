"""The list of commands against the documents themselves. They are no part of this repository: where they lie is told
by the variable PRIME_RL_SEEDS, a directory with one file a document, named by its number."""

import os
import re
from pathlib import Path

import pytest

from tests.seeds.extraction import Command, commands
from tests.seeds.listed import COMMANDS, OTHERS

DIRECTORY = os.environ.get("PRIME_RL_SEEDS")
NUMBERS = ("000", "001", "002", "003", "004")
HUB = re.compile(r"https://[^/\s]+/your-username")
"""The address of a wheel, which the list does not repeat."""
OURS = re.compile(r"\buv\s+run\s+(?:rl|sft|trainer|orchestrator|inference|eval|torchrun)\b")

needs_documents = pytest.mark.skipif(DIRECTORY is None, reason="PRIME_RL_SEEDS does not name the documents' directory")


def document(number: str) -> str:
    assert DIRECTORY is not None
    (path,) = Path(DIRECTORY).glob(f"{number}_*")
    return HUB.sub("<hub>/your-username", path.read_text(encoding="utf-8"))


@needs_documents
@pytest.mark.parametrize("number", NUMBERS)
def test_every_command_of_a_document_is_listed_and_no_other(number):
    found = commands(document(number))
    ours = {command.at: command for command in COMMANDS.values() if command.document == number}
    others = sorted(text for text in OTHERS if text.startswith(f"{number}-"))
    at = [(f"{number}-L{command.line}", command) for command in found]
    assert {where: command.text for where, command in at if where in ours} == {w: c.text for w, c in ours.items()}
    assert all(command.is_prose == ours[where].in_prose for where, command in at if where in ours)
    assert sorted(f"{where} {command.text}" for where, command in at if where not in ours) == others


@needs_documents
@pytest.mark.parametrize("number", NUMBERS)
def test_a_blunter_count_finds_as_many_commands_of_ours(number):
    ours = [command for command in COMMANDS.values() if command.document == number]
    assert len(OURS.findall(document(number))) == len(ours)


@needs_documents
def test_there_are_five_documents():
    assert DIRECTORY is not None
    assert sorted(path.name[:3] for path in Path(DIRECTORY).iterdir()) == list(NUMBERS)


def test_a_command_is_read_over_its_continuation_lines_and_without_its_comment():
    text = "Do `rl --help` first.\n```bash\n# or `git clone x`\nuv run rl \\\n  --a 1 # why\n\ncd x\n```\n"
    assert commands(text) == [
        Command(1, "rl --help", True),
        Command(3, "git clone x", True),
        Command(4, "uv run rl \\\n  --a 1", False),
        Command(7, "cd x", False),
    ]


def test_a_continuation_into_nothing_ends_with_its_block():
    assert commands("  ```bash\n  rl @ a \\\n  ```\n`b`\n") == [Command(2, "  rl @ a \\", False)]


def test_other_code_and_drawings_are_no_commands():
    assert commands("```toml\nuv = 1\n```\n```bash\nx\n\u251c\u2500 y\n```\n`--ckpt.interval`, `uv`\n") == []
