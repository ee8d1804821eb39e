"""A drawing of the cells of a claim as SVG: bars from zero, or dots on a logarithmic axis.

Its colours are those of docs/drawings, and follow the reader's colour scheme in the same way.
"""

from __future__ import annotations

import math
from html import escape

from asyncoll.bench.claims import Cells, Claim, show

WIDTH, LEFT, RIGHT = 400, 4, 70  # a phone's width; beside the longest bar there is room for its number
BAR, GAP, LABEL, LEGEND, CAPTION, ROW = 10, 3, 18, 22, 24, 26
UNITS = {0: "s", -3: "ms", -6: "us", -9: "ns"}
COLOURS = ("one", "two", "three", "four")
SIZES = "margin: 0; max-width: 28rem; min-width: 0"  # the page makes its drawings wider than a phone
STYLE = """  <style>
    svg { --fg: var(--md-default-fg-color, #24292f); --quiet: var(--md-default-fg-color--light, #6e7781); }
    @media (prefers-color-scheme: dark) {
      svg { --fg: var(--md-default-fg-color, #e6edf3); --quiet: var(--md-default-fg-color--light, #9198a1); }
    }
    svg text { fill: var(--fg); font: 12px sans-serif; }
    svg .caption { font-weight: bold; }
    svg .quiet { fill: var(--quiet); font-size: 10px; }
    svg .axis { stroke: var(--quiet); stroke-opacity: 0.4; }
    svg .one { fill: #4f7cc9; }
    svg .two { fill: #2e9e5b; }
    svg .three { fill: #d9822b; }
    svg .four { fill: var(--quiet); }
  </style>"""


def draw(claim: Claim, cells: Cells) -> str:
    """The SVG of one claim."""
    unit = "s" if "s" in claim.columns.values() else next(iter(claim.columns.values()))
    columns = [column for column, its in claim.columns.items() if its == unit]
    rows = [
        (row, [(place, value) for place, column in enumerate(columns) if isinstance(value := found.get(column), float)])
        for row in claim.rows
        if (found := cells.get(row))
    ]
    parts, height = {"bars": _bars, "dots": _dots}[claim.plot](rows, unit)
    legend = _legend(columns) if len(columns) > 1 else []
    top = CAPTION + LEGEND * len({y for y, _ in legend})
    caption = f'  <text class="caption" x="{LEFT}" y="14">{escape(claim.caption)}</text>'
    body = "\n".join(
        [caption, *(part for _, part in legend), f'  <g transform="translate(0 {top})">', *parts, "  </g>"]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" style="{SIZES}" viewBox="0 0 {WIDTH} {top + height}" role="img">\n'
        f"  <title>{escape(claim.caption)}</title>\n{STYLE}\n{body}\n</svg>\n"
    )


Rows = list[tuple[str, list[tuple[int, float]]]]


def _bars(rows: Rows, unit: str) -> tuple[list[str], int]:
    most = max((value for _, values in rows for _, value in values), default=1.0)
    parts, y = [], 0
    for row, values in rows:
        parts.append(f'    <text x="{LEFT}" y="{y + 13}">{escape(row)}</text>')
        y += LABEL
        for place, value in values:
            width = max(1.0, value / most * (WIDTH - LEFT - RIGHT))
            parts.append(f'    <rect class="{COLOURS[place]}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
            parts.append(f'    <text class="quiet" x="{LEFT + width + 4:.1f}" y="{y + 9}">{show(value, unit)}</text>')
            y += BAR + GAP
        y += GAP
    return parts, y


def _dots(rows: Rows, _: str) -> tuple[list[str], int]:
    values = [value for _, found in rows for _, value in found] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    first = LEFT + 16 + 7 * max((len(row) for row, _ in rows), default=0)  # right of the labels

    def at(value: float) -> float:
        return first + (math.log10(value) - low) / max(1, high - low) * (WIDTH - 20 - first)

    height = len(rows) * ROW + 18
    parts = []
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(f'    <path class="axis" d="M{x:.1f} 0V{height - 14}"/>')
        place = f'x="{x:.1f}" y="{height - 2}" text-anchor="middle"'
        parts.append(f'    <text class="quiet" {place}>{_tick(power)}</text>')
    for line, (row, found) in enumerate(rows):
        y = line * ROW + ROW // 2
        parts.append(f'    <text x="{LEFT}" y="{y + 4}">{escape(row)}</text>')
        parts += [f'    <circle class="{COLOURS[place]}" cx="{at(v):.1f}" cy="{y}" r="5"/>' for place, v in found]
    return parts, height


def _tick(power: int) -> str:
    """10^power seconds: 1 us, 10 ms."""
    scale = min(0, 3 * (power // 3))
    return f"{10 ** (power - scale)} {UNITS[scale]}"


def _legend(columns: list[str]) -> list[tuple[int, str]]:
    """Parts, each with the y of its line: a square and the name of each column."""
    parts, x, y = [], LEFT, CAPTION
    for place, column in enumerate(columns):
        width = 24 + 7 * len(column)
        if x + width > WIDTH:
            x, y = LEFT, y + LEGEND
        parts.append((y, f'  <rect class="{COLOURS[place]}" x="{x}" y="{y}" width="10" height="10"/>'))
        parts.append((y, f'  <text x="{x + 15}" y="{y + 10}">{escape(column)}</text>'))
        x += width
    return parts
