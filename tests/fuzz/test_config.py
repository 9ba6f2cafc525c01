"""Random mistakes in command lines, files and variables: each is answered with a sentence, never with a traceback.

Half of them are made on top of the files that come with the project, half on top of the defaults.
"""

import json
import os
import random
import re
import string
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from prime_rl.cli import main
from prime_rl.config.compat import translation
from prime_rl.config.load import load
from prime_rl.config.reference import ROOTS
from prime_rl.config.schema import Kind, all_keys, find
from prime_rl.config.writing import NOT_WRITTEN, to_toml
from prime_rl.errors import ConfigError

KEYS = {name: sorted(set(all_keys(root))) for name, root in ROOTS.items()}
OLD_KEYS = {name: sorted(set(translation.old_keys(root))) for name, root in ROOTS.items()}


def takes_a_literal(root: type[BaseModel], key: str) -> bool:
    target = find(root, tuple(key.split(".")))
    return target is not None and target.kind in (Kind.LIST, Kind.MAPPING, Kind.SECTION)


LITERALS = {name: [key for key in KEYS[name] if takes_a_literal(root, key)] for name, root in ROOTS.items()}

MUTATIONS = 5000
SHARE_ON_FILES = 0.5
DRY_RUNS = 480
RUNS_OF_THE_COMMAND = 12
MIN_SHARE_OF_RIGHT_ANSWERS = 0.95

JUNK: list[Any] = [
    *(
        "soon",
        "",
        " ",
        "None",
        "none",
        "true",
        "nan",
        "1e999",
        "-0",
        "0x10",
        "9" * 5000,
        "½",
        "²",
        "ü",
        "\udcff",
        "@",
        "--",
    ),
    *(
        "=",
        "a=b",
        "a,b",
        ",",
        "[",
        "]",
        "{",
        "}",
        "[1,",
        '{"a": ',
        "{'a': 1",
        "[[]]",
        "[{}]",
        '{"a": {"b": [1]}}',
        "{1, 2}",
    ),
    *(
        "{1: 2}",
        "b'x'",
        "1j",
        "...",
        "__import__('os')",
        "[" * 2000,
        '{"a":' * 200 + "1" + "}" * 200,
        "a.b.c",
        "../x",
        "/",
    ),
    *(
        "http://",
        "http://h:99999",
        "http://[::1",
        "step_1",
        "1970-01-01",
        "\n",
        "'",
        '"',
        "\\",
        "%s",
        "{}",
        "[]",
        "x" * 300,
    ),
]
TOML_JUNK: list[Any] = [
    *(
        0,
        -1,
        10**30,
        1.5,
        float("nan"),
        float("inf"),
        True,
        False,
        "",
        "soon",
        "None",
        "true",
        [],
        [1],
        ["a", 1],
        [[[]]],
    ),
    *([{}], [{"id": 1}], [{"id": "a"}, 3], {}, {"a": 1}, {"a": {"b": {}}}, {"0": 1}, {"": 1}, {"a b": [1]}, "http://h"),
]
NOT_TOML = [
    "=",
    "[",
    "[[",
    "a = = 1",
    "a = [1,",
    'a = "',
    "a = 1 b = 2",
    "\x00",
    "[a]\n[a]",
    "a.b = 1\na = 2",
    "é = 1",
    "a = 1_",
]


ROOT = Path(__file__).parents[2]
SHORT = {"train": "trainer", "orch": "orchestrator", "infer": "inference", "my-config": "rl"}


def command_of(path: Path) -> str:
    """The command that a file of the project is for, which its name or its directory tells."""
    part = path.relative_to(ROOT).parts[1]
    return part if part in ROOTS else SHORT.get(path.stem, path.stem)


FILES = sorted(path for top in ("configs", "examples") for path in (ROOT / top).rglob("*.toml"))
FILES_OF = {name: [str(path) for path in FILES if command_of(path) == name] for name in ROOTS}


@dataclass
class Case:
    """A command line, what surrounds it, and what a complaint must name: the flag, variable or file of the mistake."""

    argv: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)

    def is_named_in(self, answer: str) -> bool:
        """Whether the answer names what is mistaken, as a word of its own."""
        whole = (rf"(?<![\w-]){re.escape(word)}(?![\w-]|\.\w)" for word in self.about if word)
        return any(re.search(pattern, answer) for pattern in whole)


class Maker:
    """Makes one wrong (or at least strange) command line after the other."""

    def __init__(self, name: str, directory: Path, seed: int) -> None:
        self.root = ROOTS[name]
        self.name = name
        self.random = random.Random(seed)
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.count = 0

    def case(self) -> Case:
        kinds = [self.wrong_type, self.misspelt, self.missing_file, self.bad_toml, self.bad_literal, self.conflict]
        kinds += [self.older, self.soup, self.far_entry]
        case = self.random.choice(kinds)()
        if self.random.random() < SHARE_ON_FILES:
            case.argv = ["@", self.random.choice(FILES_OF[self.name]), *case.argv]
        return case

    # the kinds of mistakes

    def wrong_type(self) -> Case:
        return self.written(self.key(), self.random.choice([*JUNK, *TOML_JUNK]))

    def older(self) -> Case:
        return self.written(
            self.random.choice(OLD_KEYS[self.name] or KEYS[self.name]), self.random.choice([*JUNK, *TOML_JUNK])
        )

    def misspelt(self) -> Case:
        return self.written(misspell(self.key(), self.random), self.random.choice(["1", "x", "true", 1, 0.5, "a,b"]))

    def missing_file(self) -> Case:
        name = self.random.choice(["none.toml", str(self.directory), "no/such/dir.toml", "x" * 300, "~", "\udcff.toml"])
        section = self.random.choice([[], [], [f"--{self.key().partition('.')[0]}"]])
        words = self.random.choice([["@", name], [f"@{name}"]])
        if self.random.random() < 0.3:
            name = name.encode("ascii", "ignore").decode()
            path = self.file(f"toml_files = [{json.dumps(name)}]\n")
            words = ["@", str(path)]
        return Case(argv=[*section, *words], about=[name, ascii(name)[1:-1], *section])

    def bad_toml(self) -> Case:
        text = tomli_w.dumps(nested(self.key(), self.random.choice([1, "x", True]))) + self.random.choice(NOT_TOML)
        where = self.random.randrange(len(text))
        text = self.random.choice([text, text[:where], text[:where] + self.random.choice('[]={}"\n#.') + text[where:]])
        path = self.file(text)
        return Case(argv=["@", str(path)], about=[path.name])

    def bad_literal(self) -> Case:
        text = json.dumps(self.random.choice([{"a": 1}, [1, 2], {"name": "x", "id": 3}, [{"id": "a"}], {"type": "x"}]))
        where = self.random.randrange(len(text))
        return self.flag(
            self.random.choice(LITERALS[self.name]),
            self.random.choice([text[:where], text + "}", text[:where] + "?" + text[where:]]),
        )

    def conflict(self) -> Case:
        shared = getattr(self.root, "shared", {})
        if not shared:
            return self.wrong_type()
        key = self.random.choice(sorted(shared))
        places = [key, *shared[key]]
        first, second = self.random.sample(places, 2)
        one, other = (
            self.written(first, self.random.choice(["1", "a"])),
            self.written(second, self.random.choice(["2", "b"])),
        )
        return Case([*one.argv, *other.argv], one.variables | other.variables, [*one.about, *other.about])

    def soup(self) -> Case:
        cases = [self.random.choice([self.wrong_type, self.older, self.misspelt, self.bad_literal])() for _ in range(3)]
        words = [word for case in cases for word in case.argv]
        self.random.shuffle(words)
        words = words[: self.random.randrange(len(words) + 1)]
        variables = {key: value for case in cases for key, value in case.variables.items()}
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        others = [form for word in words if word[:2] != "--" for form in (repr(word), f"{Path(word)}:")]
        lone_at = ["@ must be followed by a TOML file", "@ after @ must be followed"] if "@" in words else []
        return Case(words, variables, [*flags, *others, *lone_at, *(about for case in cases for about in case.about)])

    def far_entry(self) -> Case:
        index = self.random.choice(["0", "1", "7", "-1", "99999999999", "²", "x", ""])
        parts = self.key().split(".")
        parts.insert(self.random.randrange(len(parts) + 1), index)
        return self.written(".".join(parts), self.random.choice(["1", "x", {"a": 1}, [1]]))

    # where a mistake is made

    def key(self) -> str:
        return self.random.choice(KEYS[self.name])

    def written(self, key: str, value: Any) -> Case:
        if isinstance(value, str):
            places = [self.flag, self.flag, self.variable, self.in_file]
            return self.random.choice(places)(key, value)
        return self.in_file(key, value)

    def flag(self, key: str, value: str) -> Case:
        spelt = self.random.choice([key, key.replace("_", "-")])
        prefix = self.random.choice(["--", "--", "--", "--no-"])
        words = self.random.choice([[f"{prefix}{spelt}", value], [f"{prefix}{spelt}={value}"], [f"{prefix}{spelt}"]])
        return Case(argv=words, about=[f"{prefix}{spelt}"])

    def variable(self, key: str, value: str) -> Case:
        name = "PRIME_" + key.upper().replace(".", "__")
        return Case(variables={name: value.replace("\x00", "")}, about=[name])

    def in_file(self, key: str, value: Any) -> Case:
        section, _, below = key.partition(".")
        nest = bool(below) and self.random.random() < 0.3
        value = value.encode("utf-8", "ignore").decode() if isinstance(value, str) else value
        path = self.file(tomli_w.dumps(nested(below if nest else key, value)))
        words = [f"--{section}"] if nest else []
        return Case(argv=[*words, "@", str(path)], about=[path.name, *words])

    def file(self, text: str) -> Path:
        self.count += 1
        path = self.directory / f"{self.name}{self.count}.toml"
        path.write_text(text, encoding="utf-8")
        return path


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def words_of(text: str) -> list[str]:
    return [word for word in "".join(c if c.isalnum() or c == "_" else " " for c in text).split() if len(word) > 1]


def misspell(key: str, rng: random.Random) -> str:
    """One edit of one letter in one part of a dotted key."""
    parts = key.split(".")
    place = rng.randrange(len(parts))
    word = parts[place]
    at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase + "_")
    edited = [word[:at] + letter + word[at:], word[:at] + word[at + 1 :], word[:at] + letter + word[at + 1 :]]
    edited.append(word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :])
    parts[place] = rng.choice(edited)
    return ".".join(parts)


def attempt(root: type[BaseModel], case: Case) -> BaseModel | ConfigError:
    try:
        return load(root, case.argv, case.variables)
    except ConfigError as error:
        return error


def resolves_to_itself(maker: Maker, config: BaseModel) -> bool:
    path = maker.file(to_toml(config))
    kept = {key: value for key, value in config if key not in NOT_WRITTEN}
    return {key: value for key, value in load(maker.root, ["@", str(path)], {}) if key in kept} == kept


def is_finite(config: BaseModel) -> bool:
    return not {"nan", "inf"} & set(words_of(repr(config)))


@pytest.mark.parametrize("name", ROOTS)
def test_no_mistake_shows_a_traceback_and_every_answer_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    maker = Maker(name, tmp_path, seed=len(name))
    refused = accepted = 0
    for _ in range(MUTATIONS // len(ROOTS) + 1):
        case = maker.case()
        answer = attempt(maker.root, case)
        if isinstance(answer, ConfigError):
            refused += 1
            assert case.is_named_in(str(answer)), (case, str(answer))
            assert len(str(answer).splitlines()) <= 20, (case, str(answer))
        else:
            accepted += 1
            # Values are dumped as JSON, which has no infinity; nan differs from itself.
            assert accepted % 4 or not is_finite(answer) or resolves_to_itself(maker, answer), case
    assert refused > accepted > 0


@pytest.mark.parametrize("place", ["flag", "file", "variable"])
def test_a_key_with_one_wrong_letter_is_answered_with_the_right_one(place, tmp_path, capsys):
    rng = random.Random(7)
    right, wrong = 0, list[tuple[str, str, str, str]]()
    for name, root in ROOTS.items():
        maker = Maker(name, tmp_path, seed=1)
        keys = KEYS[name] if place == "flag" else rng.sample(KEYS[name], len(KEYS[name]) // 3)
        for key in keys:
            misspelt = misspell(key, rng)
            if not misspelt.strip(".") or ".." in misspelt or translation.kind_at(root, tuple(misspelt.split("."))):
                continue  # no word is left of it, or it is another key
            case = getattr(maker, {"flag": "flag", "file": "in_file", "variable": "variable"}[place])(misspelt, "1")
            case.argv = [f"--{misspelt}=1"] if place == "flag" else case.argv
            answer = str(attempt(root, case))
            if suggests(answer, key, place):
                right += 1
            else:
                wrong.append((name, misspelt, key, answer))
    share = right / (right + len(wrong))
    with capsys.disabled():
        print(f"\n{place}: {share:.1%} of {right + len(wrong)} misspelt keys are answered with the right one")
    assert right + len(wrong) > 200
    assert share >= MIN_SHARE_OF_RIGHT_ANSWERS, wrong[:20]


def suggests(answer: str, key: str, place: str) -> bool:
    """Whether the first key that is suggested is `key`; of a file, a section that was misspelt is enough."""
    suggested = re.split(r", | or |\?", answer.partition("did you mean ")[2])[0]
    name = ".".join(part for part in suggested.split(".") if not part.isdigit())
    return bool(name) and f"{key}.".startswith(f"{name}.") if place == "file" else key == name


@pytest.mark.parametrize("name", ROOTS)
def test_a_dry_run_writes_files_that_resolve_to_themselves_or_says_what_is_wrong(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    maker = Maker(name, tmp_path, seed=100 + len(name))
    refused = written = 0
    for number in range(DRY_RUNS // len(ROOTS)):
        case, run_dir = maker.case(), tmp_path / f"run{number}"
        with monkeypatch.context() as patch:
            for variable, value in case.variables.items():
                patch.setenv(variable, value)
            # A flag, which wins: no mutation writes anywhere else.
            status = status_of(name, [*case.argv, "--output-dir", str(run_dir), "--dry-run"])
        said = capsys.readouterr()
        if asks_for_help(case):
            continue
        if status is None:
            written += 1
            files = sorted((run_dir / "configs").iterdir())
            assert sorted(said.out.splitlines()) == [f"{name}: wrote {path}" for path in files]
            for path in files:
                config = load(ROOTS[path.stem], ["@", str(path)], {})
                assert not is_finite(config) or to_toml(config) == path.read_text(encoding="utf-8"), (case, path)
        else:
            refused += 1
            assert str(status).startswith(f"{name}: "), (case, status)
            assert not run_dir.exists(), (case, status)
    assert refused > written > 0


def status_of(name: str, argv: list[str]) -> str | int | None:
    """What the command exits with; None where it returns."""
    try:
        main([name, *argv])
    except SystemExit as exit:
        return exit.code
    return None


def asks_for_help(case: Case) -> bool:
    return bool({"-h", "--help"} & set(case.argv))


def test_the_commands_end_with_a_sentence_and_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [list(ROOTS)[number % len(ROOTS)] for number in range(RUNS_OF_THE_COMMAND)]
    cases = [refused(Maker(name, tmp_path / str(number), seed=number)) for number, name in enumerate(names)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = list(pool.map(run_command, names, cases))
    for name, case, result in zip(names, cases, results, strict=True):
        assert result.returncode in (1, 2), (case, result)
        assert "Traceback" not in result.stderr, (case, result.stderr)
        assert result.stderr.startswith(f"{name}: "), (case, result.stderr)


def run_command(name: str, case: Case) -> subprocess.CompletedProcess[str]:
    code = f"from prime_rl.cli import main; main({[name, *case.argv, '--dry-run']!r})"
    variables = os.environ | case.variables
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def refused(maker: Maker) -> Case:
    """A case that is a mistake indeed, and none of the command's own words."""
    while True:
        case = maker.case()
        if isinstance(attempt(maker.root, case), ConfigError) and not asks_for_help(case):
            return case
