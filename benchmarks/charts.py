"""Bar charts as small SVG files, readable on a light page and on a dark one: a panel a work, a bar a system, a thin
line from the least round to the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, NAME_WIDTH, VALUE_WIDTH = 760, 190, 120
HEAD, BAR, GAP, BETWEEN = 30, 20, 8, 20
STYLE = """
    text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #24313d }
    .head { font-weight: 600 }
    .unit { fill: #5d6f80 }
    .ours { fill: #1f7a8c }
    .theirs { fill: #a9b8c6 }
    .spread { stroke: #24313d; stroke-width: 1.2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e9ef }
      .unit { fill: #9fb0c0 }
      .ours { fill: #3fb0c6 }
      .theirs { fill: #5b6b7a }
      .spread { stroke: #e3e9ef }
    }
"""


class Bar(NamedTuple):
    """A system's figure: `value` from `least` to `most`."""

    who: str
    value: float
    least: float
    most: float
    ours: bool


class Panel(NamedTuple):
    """A work and who did it, best first; `unit` says also whether more or less is better."""

    title: str
    unit: str
    bars: Sequence[Bar]


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The text of an SVG file."""
    height = sum(HEAD + len(panel.bars) * (BAR + GAP) + BETWEEN for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"  <title>{escape(title)}</title>",
        f"  <style>{STYLE}  </style>",
    ]
    top = 0
    for panel in panels:
        lines += _panel(panel, top)
        top += HEAD + len(panel.bars) * (BAR + GAP) + BETWEEN
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, top: int) -> list[str]:
    room = WIDTH - NAME_WIDTH - VALUE_WIDTH
    most = max(bar.most for bar in panel.bars) or 1.0
    head = f'<tspan class="head">{escape(panel.title)}</tspan> <tspan class="unit">{escape(panel.unit)}</tspan>'
    lines = [f'  <text x="0" y="{top + 18}">{head}</text>']
    for number, bar in enumerate(panel.bars):
        y = top + HEAD + number * (BAR + GAP)
        wide, least, end = (NAME_WIDTH + room * each / most for each in (bar.value, bar.least, bar.most))
        middle, baseline = y + BAR / 2, y + 15
        kind = "ours" if bar.ours else "theirs"
        lines += [
            f'  <text x="{NAME_WIDTH - 10}" y="{baseline}" text-anchor="end">{escape(bar.who)}</text>',
            f'  <rect class="{kind}" x="{NAME_WIDTH}" y="{y}" width="{max(1.0, wide - NAME_WIDTH):.1f}" '
            f'height="{BAR}" rx="2"/>',
            f'  <line class="spread" x1="{least:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>',
            f'  <text x="{end + 8:.1f}" y="{baseline}">{figure(bar.value)}</text>',
        ]
    return lines


def figure(value: float) -> str:
    """Three or more digits that count: 1,234,567, 12.3, 0.0123."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
