"""Each command of ours in the documents, typed into bash as it stands there with `--dry-run` behind it.

What looks at these dry runs stands in this file, and only here: a worker that runs the tests of a file makes them once.
"""

import re
from collections import Counter

import pytest

from prime_rl.config.load import resolve
from prime_rl.config.reference import ROOTS
from prime_rl.config.writing import to_toml
from tests.seeds.listed import COMMANDS, FRAGMENTS, misses
from tests.seeds.shell import Outcome, dry

FILES = [(at, name) for at, command in COMMANDS.items() for name in command.writes]
SAMPLE = [("002-L500", "rl"), ("004-L207", "trainer"), ("003-L86", "orchestrator"), ("003-L167", "inference")]
SAMPLE += [("002-L625", "sft"), ("002-L351", "eval")]
OLDER_PATHS = {"000-L72": "002-L83", "000-L78": "002-L89", "000-L82": "002-L93"}
"""A debug command with a configuration's older path -> the one with its newer path."""


AGENT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/agent/.*\n", re.MULTILINE)
"""What torchrun's agents log themselves: of two nodes that are done, one may end before the other has heard of it."""


def assert_ended_well(outcome: Outcome) -> None:
    assert "Traceback" not in AGENT.sub("", outcome.output + outcome.errors)
    assert outcome.status == 0, outcome.output[-2000:] + outcome.errors[-3000:]


@pytest.mark.parametrize("at", COMMANDS)
def test_a_command_of_the_documents_resolves_to_what_they_promise(at, dry_runs):
    command, outcome = COMMANDS[at], dry_runs.of(COMMANDS[at])
    assert_ended_well(outcome)
    written = outcome.written(command.output_dir)
    assert sorted(written) == sorted(command.writes)
    assert command.broken(written) == []
    assert [words for words in command.says if words not in outcome.output] == []


@pytest.mark.parametrize("at", COMMANDS)
def test_each_older_spelling_is_answered_with_the_new_one_and_a_current_spelling_with_nothing(at, dry_runs):
    assert dry_runs.of(COMMANDS[at]).notices() == COMMANDS[at].notes


@pytest.mark.parametrize("at", OLDER_PATHS)
def test_the_older_path_of_a_debug_configuration_resolves_to_the_newer_one(at, dry_runs):
    older, newer = COMMANDS[at], COMMANDS[OLDER_PATHS[at]]
    assert dry_runs.of(older).written(older.output_dir) == dry_runs.of(newer).written(newer.output_dir)


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


@pytest.mark.parametrize("at", FRAGMENTS)
def test_a_piece_of_configuration_in_the_documents_resolves_or_is_refused_with_the_fix(at, shell):
    fragment = FRAGMENTS[at]
    outcome = shell.run(dry(fragment.command), shell.directory({"fragment.toml": fragment.text}))
    if fragment.says:
        assert outcome.status == 1
        assert [words for words in fragment.says if words not in outcome.errors] == [], outcome.errors
        assert "Traceback" not in outcome.errors
        assert outcome.written("outputs") == {}
    else:
        assert_ended_well(outcome)
        assert fragment.broken(outcome.written("outputs")) == []


def test_the_first_run_of_document_001_takes_two_gpus_and_twenty_steps(shell):
    """Its block of code is lost; what it says of it is not."""
    outcome = shell.run("uv run rl @ examples/reverse_text/rl.toml --dry-run", shell.directory())
    assert_ended_well(outcome)
    promised = {"inference_gpu_ids": [0], "trainer_gpu_ids": [1], "max_steps": 20, "output_dir": "outputs"}
    assert list(misses(promised, outcome.written("outputs")["rl"], "rl")) == []


def test_every_command_promises_something():
    assert [at for at, command in COMMANDS.items() if not (command.promises or command.promised or command.says)] == []


def test_seventy_six_blocks_of_code_start_our_commands_and_eight_sentences_do():
    def count(in_prose: bool) -> Counter[str]:
        return Counter(command.document for command in COMMANDS.values() if command.in_prose == in_prose)

    assert count(in_prose=False) == {"000": 23, "002": 37, "003": 12, "004": 4}
    assert count(in_prose=True) == {"000": 3, "002": 4, "003": 1}
    assert count(in_prose=False).total() == 76


@pytest.mark.parametrize(
    ("promised", "written"),
    [
        ({"a": 1}, {}),
        ({"a": {}}, {"a": 1}),
        ({"a": [{"b": 1}]}, {"a": []}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
        ({"a": {"b": "x"}}, {"a": {"b": "y", "c": 1}}),
    ],
)
def test_a_broken_promise_is_seen(promised, written):
    assert list(misses(promised, written, "file")) != []


def test_a_kept_promise_is_seen_beside_what_was_not_promised():
    assert list(misses({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 2}], "d": 3}, "file")) == []
