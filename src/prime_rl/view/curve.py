"""A curve in the terminal and as an SVG picture, from plain numbers."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"


def text_curve(values: Sequence[float], *, width: int = 60, height: int = 8, label: str = "") -> str:
    """A filled curve of `height` rows, at most `width` columns wide; longer series are averaged into columns."""
    if not values:
        return f"{label}: nothing recorded"
    columns = _columns(values, width)
    low, high = min(0.0, *columns), max(columns)
    span = (high - low) or 1.0
    levels = [(value - low) / span * height for value in columns]
    rows = []
    for row in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[round(8 * min(1.0, max(0.0, level - row)))] for level in levels)
        edge = f"{high:6.2f}" if row == height - 1 else f"{low:6.2f}" if row == 0 else " " * 6
        rows.append(f"{edge} |{cells}")
    return "\n".join([*rows, f"{'':6} +{'-' * len(columns)}", f"{'':8}{label}"])


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def svg_curve(points: Sequence[tuple[int, float]], *, title: str, width: int = 720, height: int = 360) -> str:
    """A line through (step, value) points with axes, as the text of an SVG file."""
    left, right, top, bottom = 56, 16, 36, 40
    steps = [step for step, _ in points] or [0]
    values = [value for _, value in points] or [0.0]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(0.0, *values), max(1.0, *values)

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (step - first) / (last - first) * (width - left - right)
        y = top + (high - value) / (high - low) * (height - top - bottom)
        return round(x, 1), round(y, 1)

    grid = []
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = place(first, value)
        grid.append(f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        grid.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
    for i in range(5):
        step = round(first + (last - first) * i / 4)
        x, _ = place(step, low)
        grid.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>{"".join(grid)}'
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">step</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>\n'
    )
