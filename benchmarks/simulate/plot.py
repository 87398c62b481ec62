"""A small SVG by hand: lines over a logarithmic axis of pods, one panel a figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 320, 220, 52, 34, 40, 18
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8d5a97", "#b58900", "#444444", "#2aa198")

Points = Sequence[tuple[float, float]]


def svg(panels: Mapping[str, Mapping[str, Points]], along: str) -> str:
    """Return panels beside each other, each with its lines by name; `along` says what x is."""
    rows = max(len(lines) for lines in panels.values())
    height = _HEIGHT + rows * _LEGEND
    drawn = [
        f'<g transform="translate({number * _WIDTH},0)">{"".join(_panel(title, lines, along))}</g>'
        for number, (title, lines) in enumerate(panels.items())
    ]
    size = f'width="{_WIDTH * len(panels)}" height="{height}"'
    style = 'font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{ground}{"".join(drawn)}</svg>\n'


def _panel(title: str, lines: Mapping[str, Points], along: str) -> list[str]:
    points = [point for line in lines.values() for point in line]
    low, high = (math.log(edge(x for x, _ in points)) for edge in (min, max))
    most = max(y for _, y in points) or 1.0
    right, bottom = _WIDTH - 14, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / ((high - low) or 1)
        return round(_LEFT + share * (right - _LEFT), 1), round(bottom - y / most * (bottom - _TOP), 1)

    parts = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for share in (0, 0.5, 1):
        _, y = at(math.exp(low), share * most)
        parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share * most:.3g}</text>')
    ticks = sorted({x for x, _ in points})
    parts += [f'<text x="{at(x, 0)[0]}" y="{bottom + 15}" text-anchor="middle">{x:.0f}</text>' for x in ticks]
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 30}" text-anchor="middle">{escape(along)}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        below = _HEIGHT + 4 + number * _LEGEND
        parts.append(f'<path d="M{_LEFT} {below - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_LEFT + 24}" y="{below}">{escape(name)}</text>')
    return parts
