import sys

import pytest

from prime_rl.config.functions import load_function, reason
from prime_rl.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The directory that the run is started in, which is nowhere on the path yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def load(path: str, **kwargs):
    return load_function(path, key="advantage", takes="group", kwargs=kwargs)


def test_a_function_is_found_in_the_directory_that_the_run_was_started_in(here):
    (here / "own_scores.py").write_text("def double(group, times=2):\n    return group * times\n")
    assert load("own_scores.double", times=3)(2) == 4
    assert load("own_scores:double") is load("own_scores.double")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("double", "advantage.import_path = 'double' is no path to a function; write it as package.module.function"),
        ("own_nothing.double", r"there is no module 'own_nothing', neither installed nor in"),
        ("own_needs.double", "module 'own_needs' needs 'own_library', which is not installed"),
        ("own_broken.double", r"module 'own_broken' cannot be imported: ZeroDivisionError: .*own_broken.py:1\)"),
        ("own_empty.double", "module 'own_empty' has no function 'double'; it has no functions"),
        ("own_names.Double", "module 'own_names' has no function 'Double'; it has double"),
        ("own_names.double", r"advantage.kwargs: own_names.double cannot be called with \(group\): "),
    ],
)
def test_a_path_that_leads_to_no_function_says_where_it_ends(here, path, message):
    (here / "own_needs.py").write_text("import own_library")
    (here / "own_broken.py").write_text("1 / 0")
    (here / "own_empty.py").write_text("")
    (here / "own_names.py").write_text("def double(group, times):\n    return group * times\n")
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_reason_names_the_innermost_place():
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (Python's own words)
        int("x")
    assert "test_functions.py:" in reason(caught.value)
    assert reason(ValueError("y")) == "ValueError: y"
