"""Draws the life of a request, as ARCHITECTURE.md shows it: rooms it passes, and what brings it from one to the next.

python scripts/docs_life.py docs/life_of_a_request.svg

It is an image, since the site fetches nothing from other hosts and a drawing program for Mermaid would come from one.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from docs_svg import DARK, LIGHT

BOX, HIGH, ACROSS, DOWN, MARGIN = 140, 48, 210, 120, 20
"""Pixels: of a box, and from one box to the next."""

NODES = {
    "call": (0, 0, "LLM.generate", "prompts"),
    "input": (1, 0, "InputProcessor", "tokens, limits"),
    "waiting": (2, 0, "Scheduler", "waiting"),
    "running": (3, 0, "Scheduler", "running"),
    "swapped": (4, 0, "swapped", "returns first"),
    "disk": (1, 1, "disk", "evicted blocks"),
    "memory": (2, 1, "MemoryManager", "tables, prefixes"),
    "step": (3, 1, "ScheduledStep", "chunks, copies"),
    "output": (0, 2, "OutputProcessor", "RequestOutput"),
    "update": (1, 2, "Scheduler.update", "stops, frees"),
    "device": (2, 2, "step on device", "pool donated"),
    "batch": (3, 2, "BatchBuilder", "padded arrays"),
}
"""Column, row and two lines of each box."""

ARROWS = (
    ((0.5, 0.5), "call", "input", ""),
    ((0.5, 0.5), "input", "waiting", ""),
    ((0.25, 0.25), "waiting", "running", "admit"),
    ((0.75, 0.75), "running", "waiting", "no memory"),
    ((0.25, 0.25), "running", "swapped", "or swap"),
    ((0.5, 0.5), "swapped", "running", ""),
    ((0.5, 0.5), "running", "step", "schedule"),
    ((0.5, 0.5), "step", "batch", ""),
    ((0.5, 0.5), "batch", "device", ""),
    ((0.5, 0.5), "device", "memory", "blocks known"),
    ((0.5, 0.5), "device", "update", "tokens"),
    ((0.5, 0.5), "update", "output", ""),
    ((0.5, 0.5), "memory", "disk", "evicted"),
    ((0.5, 0.5), "memory", "waiting", "prefix hits"),
)
"""Where along their sides two boxes are joined, the boxes, and what it says."""


def life() -> str:
    """Return the drawing as SVG; it has a ground of its own, light or dark as the reader's system asks for."""
    width, height = 2 * MARGIN + 4 * ACROSS + BOX, 2 * MARGIN + 2 * DOWN + HIGH + 20
    parts = [_box(*node) for node in NODES.values()]
    for (begin, end), source, target, label in ARROWS:
        parts.append(_arrow(NODES[source][:2], NODES[target][:2], begin, end, label))
    parts += [_read_ahead(), _goes_on()]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>The life of a request</title><style>{_style()}</style>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _corner(column: int, row: int) -> tuple[int, int]:
    return MARGIN + column * ACROSS, MARGIN + row * DOWN


def _box(column: int, row: int, name: str, what: str) -> str:
    x, y = _corner(column, row)
    return (
        f'<rect class="box" x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="6"/>'
        + _text(x + BOX / 2, y + 20, name, "on-box")
        + _text(x + BOX / 2, y + 37, what, "on-box small")
    )


def _arrow(source: tuple[int, int], target: tuple[int, int], begin: float, end: float, label: str) -> str:
    """Draw an arrow between boxes of one row or of one column."""
    (x0, y0), (x1, y1) = _corner(*source), _corner(*target)
    if source[1] == target[1]:
        right = x1 > x0
        points = (x0 + BOX * right, y0 + begin * HIGH, x1 + BOX * (not right), y1 + end * HIGH)
        above = 14 if begin > 0.5 else -6
        said = _text((points[0] + points[2]) / 2, points[1] + above, label, "soft small")
    else:
        down = y1 > y0
        points = (x0 + begin * BOX, y0 + HIGH * down, x1 + end * BOX, y1 + HIGH * (not down))
        said = _text(points[0] + 8, (points[1] + points[3]) / 2 + 4, label, "soft small beside")
    return _path(f"M{points[0]:g} {points[1]:g}L{points[2]:g} {points[3]:g}") + (said if label else "")


def _read_ahead() -> str:
    """Draw the way from the disk to what waits."""
    (x0, y0), (x1, y1) = _corner(1, 1), _corner(2, 0)
    low = (y0 + y1 + HIGH) / 2
    path = _path(f"M{x0 + BOX / 2:g} {y0}V{low:g}H{x1 + BOX / 5:g}V{y1 + HIGH}")
    return path + _text(x0 + BOX + 20, low - 5, "read ahead", "soft small")


def _goes_on() -> str:
    """Draw the way back of what has not ended, around the boxes."""
    (x0, y0), (x1, y1) = _corner(1, 2), _corner(3, 0)
    low, right, entry = y0 + HIGH + 24, x1 + BOX + 35, y1 + 0.88 * HIGH
    path = _path(f"M{x0 + BOX / 2:g} {y0 + HIGH}V{low}H{right}V{entry:g}H{x1 + BOX}")
    return path + _text(x0 + BOX, low - 5, "not ended: goes on", "soft small beside")


def _path(way: str) -> str:
    return f'<path class="arrow" d="{way}" marker-end="url(#tip)"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _style() -> str:
    def rules(colours: dict[str, str]) -> str:
        return (
            f".ground{{fill:{colours['ground']}}}.box{{fill:{colours['used']};stroke:{colours['soft']}}}"
            f".on-box{{fill:{colours['used-ink']}}}.soft{{fill:{colours['soft']}}}.tip{{fill:{colours['ink']}}}"
            f".arrow{{stroke:{colours['ink']};fill:none;stroke-width:1.5}}"
        )

    fixed = (
        "text{font:13px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle}.small{font-size:11px}"
        ".beside{text-anchor:start}"
    )
    return f"{fixed}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(life())
