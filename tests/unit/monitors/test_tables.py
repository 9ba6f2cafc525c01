import pytest

from prime_rl.monitors.tables import GENERATION, TRAINING, aligned, mean_of, metric, table

ROWS = [{"step": 0.0, "time/step": 9.0}, {"step": 1.0, "time/step": 2.0}, {"step": 2.0, "time/step": 4.0}]


def test_the_first_step_is_shown_and_not_counted():
    lines = table("generation", ROWS, [metric("step s", "time/step", ".2f")]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["9.00", "2.00", "4.00", "3.00", "1.00", "2.00", "4.00"]
    assert lines[1].startswith("step 0 (warm-up)")
    assert [line.split()[0] for line in lines[4:]] == ["mean", "std", "min", "max"]


def test_more_steps_may_warm_up():
    lines = table("t", ROWS, [metric("step s", "time/step", ".2f")], num_warm_up=2).splitlines()
    assert [line.split()[-1] for line in lines[4:]] == ["4.00", "0.00", "4.00", "4.00"]
    assert sum("(warm-up)" in line for line in lines) == 2


def test_a_metric_that_no_step_has_is_a_dash():
    text = table("training", ROWS, TRAINING)
    header, *lines = text.splitlines()
    ends = [header.index(name) + len(name) - 1 for name in ("MFU %", "MFU' %")]
    assert {line[at] for line in lines for at in ends} == {"-"}


def test_failures_of_all_kinds_are_added_up():
    rows = [*ROWS[:1], {"errors/timeout": 2.0, "errors/scorer": 1.0, "errors/rate": 0.5}]
    assert table("t", rows, GENERATION).splitlines()[2].split()[-1] == "3"


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([["a", "bb"], ["ccc", "1"]]) == "a    bb\nccc   1"


def test_the_mean_leaves_out_the_warm_up_unless_there_is_nothing_else():
    assert mean_of(ROWS, "time/step") == pytest.approx(3.0)
    assert mean_of(ROWS[:1], "time/step") == 9.0
