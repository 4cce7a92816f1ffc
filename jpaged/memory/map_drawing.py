"""Draws a map of the pool: SVG, PNG and HTML, each without a library, a host or a script.

A large page is a cell in the colour of its group; its blocks lie in it from left to right, the more opaque the more
they are in use, so that the drawing reads on a light ground and on a dark one.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import groupby

import numpy as np
import numpy.typing as npt

from jpaged.memory.block_records import BlockState, GroupMap

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f")
"""One for each group, distinct for colour-blind readers too (Okabe and Ito), in turns where there are more."""

OPACITY = {BlockState.EMPTY: 0.12, BlockState.CACHED: 0.38, BlockState.USED: 0.7, BlockState.SHARED: 1.0}

FREE_COLOUR, FREE_OPACITY = "#808080", 0.12

WIDTH = 900
"""Pixels that a drawing is wide at most, where a cell's size is not given."""

MOST_SVG_PAGES = 2000
"""Beyond so many pages HTML shows a PNG image: a browser is slow with so many shapes."""

PageGroups = npt.NDArray[np.int32]


def svg(page_groups: PageGroups, groups: Sequence[GroupMap], columns: int) -> str:
    """Return the drawing as SVG; `columns` 0 = three times as many as rows."""
    columns = columns or _columns(len(page_groups))
    cell = max(4, min(24, WIDTH // columns))
    rows = -(-len(page_groups) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * cell} {rows * cell}" '
        f'width="{columns * cell}" role="img" aria-label="{len(page_groups)} large pages">'
    ]
    for page, g in enumerate(page_groups.tolist()):
        x, y = page % columns * cell, page // columns * cell
        if g < 0:
            shape = _rectangle(x, y, cell - 1, cell - 1, FREE_COLOUR, FREE_OPACITY)
            parts.append(f"<g><title>page {page}: free</title>{shape}</g>")
        else:
            parts.append(_page_svg(page, groups[g], COLOURS[g % len(COLOURS)], x, y, cell - 1))
    return "".join([*parts, "</svg>"])


def _page_svg(page: int, group: GroupMap, colour: str, x: int, y: int, side: int) -> str:
    size = group.blocks_per_page
    states = group.blocks["state"][page * size : (page + 1) * size].tolist()
    owners = {int(r) for r in group.blocks["request"][page * size : (page + 1) * size] if r >= 0}
    counts = ", ".join(f"{states.count(state)} {state.name.lower()}" for state in OPACITY if state in states)
    whose = f"; requests {', '.join(map(str, sorted(owners)))}" if owners else ""
    shapes, first = "", 0
    for state, run in groupby(states):
        stop = first + len(list(run))
        left, right = first * side / size, stop * side / size
        shapes += _rectangle(round(x + left, 2), y, round(right - left, 2), side, colour, OPACITY[BlockState(state)])
        first = stop
    return f"<g><title>page {page}, {escape(group.name)}: {counts}{whose}</title>{shapes}</g>"


def _rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{colour}" fill-opacity="{opacity}"/>'


def png(page_groups: PageGroups, groups: Sequence[GroupMap], columns: int, cell: int) -> bytes:
    """Return the drawing as PNG; where a page has more blocks than a cell has pixels, evenly spaced ones are shown.

    Args:
        columns: cells in a row; 0 = three times as many as rows.
        cell: pixels of a cell's side; 0 = so many that the image is about `WIDTH` wide.
    """
    columns = columns or _columns(len(page_groups))
    cell = cell or max(2, min(24, WIDTH // columns))
    side, rows = cell - (cell >= 3), max(1, -(-len(page_groups) // columns))  # an image has a row, if no page has
    image = np.zeros((rows, cell, columns, cell, 4), np.uint8)
    pages = np.flatnonzero(page_groups < 0)
    image[pages // columns, :side, pages % columns, :side] = _rgba(FREE_COLOUR, FREE_OPACITY)
    for g, group in enumerate(groups):
        pages = np.flatnonzero(page_groups == g)
        colours = np.zeros((len(BlockState), 4), np.uint8)
        for state, opacity in OPACITY.items():
            colours[state] = _rgba(COLOURS[g % len(COLOURS)], opacity)
        shown = np.arange(side) * group.blocks_per_page // side
        states = group.blocks["state"][pages[:, None] * group.blocks_per_page + shown]
        image[pages // columns, :side, pages % columns, :side] = colours[states][:, None]
    return _png_file(image.reshape(rows * cell, columns * cell, 4))


def html(page_groups: PageGroups, groups: Sequence[GroupMap], caption: str) -> str:
    """Return the drawing with a legend and a table of counts, as a piece of HTML."""
    if len(page_groups) <= MOST_SVG_PAGES:
        drawing = svg(page_groups, groups, 0)
    else:
        data = b64encode(png(page_groups, groups, 0, 0)).decode()
        drawing = f'<img alt="{escape(caption)}" style="max-width:100%" src="data:image/png;base64,{data}"/>'
    head = "".join(f"<th>{name}</th>" for name in ("group", "used", "of these shared", "tokens", "cached", "empty"))
    rows = ""
    for g, group in enumerate(groups):
        mark = f'<span style="color:{COLOURS[g % len(COLOURS)]}">&#9632;</span> {escape(group.name)}'
        values = (mark, group.used, group.shared, group.used_tokens, group.cached, group.empty)
        rows += "<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>"
    shades = ", ".join(state.name.lower() for state in reversed(OPACITY))
    return (
        f'<figure class="jpaged-memory-map" style="margin:0;font-family:sans-serif;font-size:13px">'
        f"<figcaption>{escape(caption)}. A cell is a large page in the colour of its group; from opaque to pale: "
        f"{shades}.</figcaption>{drawing}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></figure>"
    )


def _columns(num_pages: int) -> int:
    return max(1, math.isqrt(3 * num_pages))


def _rgba(colour: str, opacity: float) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)] + [round(255 * opacity)]


def _png_file(image: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG file (ISO 15948) of ``[height, width, 4]`` bytes."""
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # filter 0 each
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
