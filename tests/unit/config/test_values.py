import pytest

from prime_rl.config.values import MAX_DEPTH, Setting, Values
from prime_rl.errors import ConfigError


def values_of(*settings: tuple[tuple[str | int, ...], object]) -> Values:
    values = Values()
    for number, (path, value) in enumerate(settings):
        values.put(Setting(path, value, f"place {number}"))
    return values


def test_tables_merge_and_everything_else_is_replaced():
    values = values_of((("a",), {}), (("a", "x"), 1), (("a",), {}), (("a", "y"), [1, 2]), (("a", "y"), [3]))
    assert values.tree == {"a": {"x": 1, "y": [3]}}


def test_a_table_takes_the_place_of_a_value_and_a_value_that_of_a_table():
    assert values_of((("a",), "None"), (("a",), {})).tree == {"a": {}}
    assert values_of((("a",), None), (("a", "x"), 1)).tree == {"a": {"x": 1}}
    assert values_of((("a", "x"), 1), (("a",), None)).tree == {"a": None}
    assert values_of((("a", 0, "x"), 1), (("a", "y"), 2)).tree == {"a": {"y": 2}}
    assert values_of((("a", "y"), 2), (("a", 0, "x"), 1)).tree == {"a": [{"x": 1}]}


def test_a_list_grows_by_one_entry_at_a_time():
    values = values_of((("a", 0, "x"), 1), (("a", 1), {}), (("a", 0, "y"), 2))
    assert values.tree == {"a": [{"x": 1, "y": 2}, {}]}
    with pytest.raises(ConfigError, match="place: there is no entry 3: the list has 2, and a new one would be 2"):
        values.put(Setting(("a", 3, "x"), 1, "place"))


def test_what_is_replaced_leaves_no_places_behind():
    values = values_of((("a", 0, "x"), 1), (("a", 1, "x"), 2), (("a",), []), (("a", 0, "y"), 3))
    assert values.origin(("a", 1, "x")) == "place 2"
    assert values.origin(("a", 0, "y")) == "place 3"
    assert values.origin(("b",)) == "default"
    assert values_of((("a",), 1), (("a", "x"), 2)).origin(("a",)) == "place 1"


def test_the_place_of_a_value_is_its_own_or_that_of_the_table_around_or_inside_it():
    values = values_of((("a",), {}), (("a", "x"), 1), (("b", "c", "d"), 1))
    assert values.origin(("a", "x")) == "place 1"
    assert values.origin(("a", "z")) == "place 0"
    assert values.origin(("b", "c")) == "place 2"


def test_get_reads_through_tables_and_lists_and_takes_null_for_nothing():
    values = values_of((("a", 0, "x"), 1), (("b",), "None"))
    assert values.get(("a", 0, "x")) == 1
    assert values.get(("a", 1, "x"), default=7) == 7
    assert values.get(("a", "x"), default=7) == 7
    assert values.get(("b",), default=7) == 7


def test_an_absurdly_long_path_is_refused():
    with pytest.raises(ConfigError, match="nested more than"):
        values_of((tuple("a" * (MAX_DEPTH + 1)), 1))


def test_what_follows_from_another_value_has_its_place_and_its_strength():
    values = Values()
    for values.layer, key in enumerate("abc"):
        values.put(Setting((key,), key, f"place {key}"))
    values.fill(("x", "y"), 1, ("b",))
    values.fill(("z",), 1, ("a",), "follows a")
    assert [(values.origin(path), values.layer_of(path)) for path in (("x", "y"), ("z",))] == [
        ("place b", 1),
        ("follows a", 0),
    ]
    values.fill(("c", "d"), 1, ("a",))
    assert values.get(("c",)) == "c"


def test_a_key_that_is_removed_leaves_no_place_behind():
    values = values_of((("a", "x"), 1), (("a", "y", "z"), 2))
    values.remove(("a", "y"))
    assert values.tree == {"a": {"x": 1}}
    assert (values.origin(("a", "y", "z")), values.layers) == ("default", {("a", "x"): 0})
