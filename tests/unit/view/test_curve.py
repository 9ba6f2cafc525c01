from xml.etree import ElementTree

from prime_rl.view.curve import svg_curve, text_curve


def test_the_text_curve_has_its_extremes_on_the_axis_and_one_column_a_value():
    lines = text_curve([0.0, 0.5, 1.0], height=4, label="reward").splitlines()
    assert lines[0].startswith("  1.00 |")
    assert lines[3].startswith("  0.00 |")
    assert lines[0].endswith("  █")
    assert lines[3].endswith(" ██")
    assert lines[-1].strip() == "reward"


def test_a_long_series_is_averaged_into_the_width():
    line = text_curve([float(i % 2) for i in range(400)], width=40, height=2).splitlines()[0]
    assert len(line) <= len("  1.00 |") + 40


def test_an_empty_series_says_so():
    assert text_curve([], label="reward") == "reward: nothing recorded"


def test_the_picture_is_well_formed_and_its_line_goes_through_the_points():
    root = ElementTree.fromstring(svg_curve([(0, 0.25), (1, 0.5), (2, 1.0)], title="a < b"))
    line = next(element for element in root.iter() if element.tag.endswith("polyline"))
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert any(element.text == "a < b" for element in root.iter())
