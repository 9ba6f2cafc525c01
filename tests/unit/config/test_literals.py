import pytest

from prime_rl.config.literals import looks_like, read_value
from prime_rl.config.schema import Kind
from prime_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (Kind.SCALAR, "5", "5"),
        (Kind.SCALAR, "", ""),
        (Kind.FLAG, None, True),
        (Kind.FLAG, "false", "false"),
        (Kind.SECTION, None, {}),
        (Kind.SECTION, "cosine", "cosine"),
        (Kind.SECTION, "{'a': (1, None), 2: True}", {"a": [1, None], "2": True}),
        (Kind.LIST, "10,50, 100,", ["10", "50", "100"]),
        (Kind.LIST, '["a,b", 1]', ["a,b", 1]),
        (Kind.LIST, "", []),
        (Kind.MAPPING, '{"a": {"b": null}}', {"a": {"b": None}}),
        (Kind.MAPPING, "{'a': 1}", {"a": 1}),
        (Kind.FREE, None, True),
        (Kind.FREE, "16", 16),
        (Kind.FREE, "-1.5", -1.5),
        (Kind.FREE, "train", "train"),
        (Kind.FREE, "10.15.42.1", "10.15.42.1"),
        (Kind.FREE, "[1, 'a']", [1, "a"]),
        *((kind, "None", None) for kind in (Kind.SCALAR, Kind.LIST, Kind.SECTION, Kind.MAPPING, Kind.FREE)),
    ],
)
def test_text_is_read_by_what_its_key_expects(kind, text, expected):
    assert read_value(kind, text, "--key") == expected


@pytest.mark.parametrize("text", ["{", "[1,", "{'a': 1", "{x}", "{1, 2}", "[b'x']", "[" * 5000, "[" + "9" * 5000 + "]"])
def test_what_is_neither_json_nor_python_is_refused_with_its_key(text):
    with pytest.raises(ConfigError, match=r"^--key: .* is neither JSON .* nor a Python literal$"):
        read_value(Kind.LIST, text, "--key")


@pytest.mark.parametrize("text", ["1j", "b'x'", "...", "{1, 2}", "9" * 5000, "__import__('os')"])
def test_what_toml_cannot_hold_stays_text(text):
    assert looks_like(text) == text


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ConfigError, match=r"--key: .* is not valid UTF-8"):
        read_value(Kind.SCALAR, "a\udcff", "--key")
