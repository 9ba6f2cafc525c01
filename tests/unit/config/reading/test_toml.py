import pytest

from prime_rl.config.reading.toml import toml_lines, toml_settings
from prime_rl.errors import ConfigError

TEXT = """\
a = 1
b.c = 2

[table]  # a comment
"x" = 1

[[env]]
id = "p"
[env.args]
n = 1
[[env]]
id = "q"
[[env.inner]]
z = 1
"""


def test_every_key_has_the_line_it_stands_on():
    lines = toml_lines(TEXT)
    assert lines[("a",)] == 1
    assert lines[("b", "c")] == 2
    assert lines[("table",)] == 4
    assert lines[("table", "x")] == 5
    assert lines[("env", 0, "id")] == 8
    assert lines[("env", 0, "args", "n")] == 10
    assert lines[("env", 1, "id")] == 12
    assert lines[("env", 1, "inner", 0, "z")] == 14


def test_a_file_yields_tables_before_what_is_in_them_and_lists_of_tables_empty_first(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("x = [1]\n[[env]]\nid = 'p'\n[t]\n")
    settings = [(s.path, s.value, s.origin) for s in toml_settings(path, ("root",))]
    assert settings == [
        (("root",), {}, str(path)),
        (("root", "x"), [1], f"{path}:1"),
        (("root", "env"), [], f"{path}:2"),
        (("root", "env", 0), {}, f"{path}:2"),
        (("root", "env", 0, "id"), "p", f"{path}:3"),
        (("root", "t"), {}, f"{path}:4"),
    ]


def test_a_file_comes_after_those_it_inherits_from_relative_to_itself(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.toml").write_text("a = 1\nb = 1\n")
    (tmp_path / "deep" / "middle.toml").write_text("toml_files = ['../base.toml']\na = 2\n")
    (tmp_path / "top.toml").write_text("toml_files = ['deep/middle.toml', 'base.toml']\nc = 3\n")
    assert [(s.path[0], s.value) for s in toml_settings(tmp_path / "top.toml")] == [
        *(("a", 1), ("b", 1), ("a", 2)),
        *(("a", 1), ("b", 1)),
        ("c", 3),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = = 1", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        ("toml_files = 'base.toml'", "toml_files must be a list of file names"),
        ("toml_files = [1]", "toml_files must be a list of file names"),
        ("toml_files = ['gone.toml']", "gone.toml: no such file; {path} inherits from it"),
        ("toml_files = ['a.toml']", "leads back to this file"),
        ('toml_files = ["a\\u0000b"]', "cannot be read"),
        ("toml_files = ['.']", "cannot be read"),
        (f"a = {'9' * 5000}", "cannot be read"),
        (f"a = {'[' * 5000}", "cannot be read"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, expected):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        list(toml_settings(path))
    assert expected.format(path=path) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_no_text_or_has_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a\.toml: cannot be read"):
        list(toml_settings(path))
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert [s.value for s in toml_settings(path)] == [1]
