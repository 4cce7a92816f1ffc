"""Draws moments of a memory manager as SVG: the block tables of sequences above the pool that they point into.

Every block carries its number and its owners, and states differ by shade, hatching and outline, not by colour alone: a
drawing reads in grey. It has a ground of its own, light or dark as the reader's system asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from jpaged.memory import NO_BLOCK, BlockCopy, BlockState, MemoryManager, MemoryMap

LIGHT = {
    "ground": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#57606a",
    "used": "#cfe3f5",
    "used-ink": "#1b1f24",
    "shared": "#0b4f8a",
    "shared-ink": "#ffffff",
    "hatch": "#b4bcc5",
}
DARK = {
    "ground": "#16191d",
    "ink": "#e8ebee",
    "soft": "#a3adb8",
    "used": "#27425c",
    "used-ink": "#e8ebee",
    "shared": "#9cc9f2",
    "shared-ink": "#10202f",
    "hatch": "#454e58",
}
"""Colours by their part in a drawing."""

WIDTH, LEFT, BOX, HEIGHT, GAP = 760, 150, 60, 40, 8
"""Pixels: of a drawing, of the column of names, of a table's entry, and of the room between things."""

_STATES = {BlockState.EMPTY: "empty", BlockState.CACHED: "cached", BlockState.USED: "used", BlockState.SHARED: "shared"}


@dataclass(frozen=True)
class Table:
    """One block table: its owner's name, the block of each entry and the positions that the entry stands for."""

    name: str
    group: str
    entries: tuple[int, ...]
    positions: tuple[str, ...]


@dataclass(frozen=True)
class Moment:
    """What the manager holds between two steps."""

    caption: str
    tables: tuple[Table, ...]
    pool: MemoryMap
    owners: Mapping[tuple[int, int], str]
    copies: tuple[BlockCopy, ...] = ()


def moment(
    manager: MemoryManager, caption: str, lengths: Mapping[int, int], copies: Sequence[BlockCopy] = ()
) -> Moment:
    """Look at a manager.

    Args:
        lengths: tokens of each sequence, by its number; sequence 0 is called A.
        copies: those that the step before asked for.
    """
    tables, owners = [], {}
    for seq_id, length in lengths.items():
        for g, group in enumerate(manager.layout.groups):
            size, entries = group.spec.block_size, tuple(manager.block_table(seq_id, g))
            positions = tuple(_positions(i * size, min((i + 1) * size, length)) for i in range(len(entries)))
            tables.append(Table(name_of(seq_id), group.spec.name, entries, positions))
            for block in entries:
                if block != NO_BLOCK:
                    owners[g, block] = owners.get((g, block), "") + name_of(seq_id)
    return Moment(caption, tuple(tables), manager.map(), owners, tuple(copies))


def _positions(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def name_of(seq_id: int) -> str:
    """Return what a drawing calls a sequence: A, B, ..."""
    return chr(ord("A") + seq_id)


def drawing(title: str, moments: Sequence[Moment]) -> str:
    """Return an SVG image of the moments, one below the other."""
    parts, y = [], 0
    for number, one in enumerate(moments, 1):
        y += 30
        parts.append(_text(12, y, f"{number}. {one.caption}", "ink caption"))
        y += 14
        for table in one.tables:
            parts += _table(table, y, len(one.pool.groups) > 1)
            y += HEIGHT + GAP
        pool, y = _pool(one, y + 20)
        parts += pool
    y += 12
    legend, y = _legend(y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
        f"<title>{escape(title)}</title><style>{_style()}</style>"
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>'
        f'<rect class="ground" width="{WIDTH}" height="{y}" rx="8"/>'
    )
    return "\n".join([head, *parts, *legend, "</svg>"]) + "\n"


def _style() -> str:
    def rules(colours: Mapping[str, str]) -> str:
        return (
            f".ground,.empty,.gone{{fill:{colours['ground']}}}.cached{{fill:url(#hatch)}}"
            f".used{{fill:{colours['used']}}}.shared{{fill:{colours['shared']}}}"
            f".ink,.on-cached,.on-empty{{fill:{colours['ink']}}}.soft{{fill:{colours['soft']}}}"
            f".on-used{{fill:{colours['used-ink']}}}.on-shared{{fill:{colours['shared-ink']}}}"
            f".hatch{{stroke:{colours['hatch']};stroke-width:3}}"
            f".box,.page{{stroke:{colours['soft']}}}.arrow{{stroke:{colours['ink']};fill:none;stroke-width:1.5}}"
        )

    fixed = (
        "text{font:12px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle}.caption{font-weight:bold}"
        ".caption,.name{text-anchor:start}.small{font-size:10px}.page{fill:none;stroke-width:1.5}"
        ".free{stroke-dasharray:4 4}.gone{stroke-dasharray:2 3}"
    )
    return f"{fixed}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, kind: str, upper: str, lower: str) -> list[str]:
    """Return a block: its shade, and two lines in it."""
    ink = "soft" if kind == "gone" else f"on-{kind}"
    middle = x + width / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" class="box {kind}"/>',
        _text(middle, y + 17, upper, ink),
        _text(middle, y + 32, lower, f"{ink} small"),
    ]


def _table(table: Table, y: int, several: bool) -> list[str]:
    name = f"{table.name}, {table.group}" if several else f"table of {table.name}"
    parts = [_text(12, y + 25, name, "ink name")]
    for i, (block, positions) in enumerate(zip(table.entries, table.positions, strict=True)):
        x = LEFT + i * BOX
        if block == NO_BLOCK:
            parts += _box(x, y, BOX, "gone", "-", "released")
        else:
            parts += _box(x, y, BOX, "empty", f"block {block}", positions)
    return parts


def _pool(one: Moment, y: int) -> tuple[list[str], int]:
    """Return the pool of a moment, and where it ends."""
    page_width = max(BOX, 54 * max(group.blocks_per_page for group in one.pool.groups))
    columns = (WIDTH - LEFT + GAP - 12) // (page_width + GAP)
    parts = [_text(12, y + 25, "pool", "ink name")]
    several, places = len(one.pool.groups) > 1, {}
    for page, g in enumerate(one.pool.page_groups.tolist()):
        x, top = LEFT + page % columns * (page_width + GAP), y + page // columns * (HEIGHT + 30)
        free = g < 0
        if free:
            parts += [_text(x + page_width / 2, top + 25, "free", "soft")]
        else:
            group = one.pool.groups[g]
            width = page_width / group.blocks_per_page
            for i, block in enumerate(one.pool.page(page)):
                number = page * group.blocks_per_page + i
                kind = _STATES[block.state]
                owner = one.owners.get((g, number), "cached" if kind == "cached" else "empty")
                parts += _box(x + i * width, top, width, kind, str(number), owner)
                places[g, number] = x + (i + 0.5) * width, top
        parts.append(
            f'<rect x="{x:g}" y="{top}" width="{page_width}" height="{HEIGHT}" class="page{" free" if free else ""}"/>'
        )
        if several:
            label = f"page {page}" if free else f"page {page}: {one.pool.groups[g].name}"
            parts.append(_text(x + page_width / 2, top + HEIGHT + 13, label, "soft small"))
    for copy in one.copies:
        parts += _arrow(places[copy.group, copy.src], places[copy.group, copy.dst])
    rows = -(-len(one.pool.page_groups) // columns)
    return parts, y + rows * (HEIGHT + 30) - (0 if several else 18)


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> list[str]:
    """Return an arc over the pool, from the block that is copied to its copy."""
    (x0, y0), (x1, y1) = start, end
    return [
        f'<path class="arrow" d="M{x0:g} {y0:g}C{x0:g} {y0 - 18:g} {x1:g} {y1 - 18:g} {x1:g} {y1 - 2:g}"/>',
        f'<path class="arrow" d="M{x1 - 4:g} {y1 - 7:g}L{x1:g} {y1 - 1:g}L{x1 + 4:g} {y1 - 7:g}"/>',
    ]


def _legend(y: int) -> tuple[list[str], int]:
    parts, x = [], 12
    for kind, text in (("used", "one owner"), ("shared", "shared"), ("cached", "cached, nobody's"), ("empty", "empty")):
        parts.append(f'<rect x="{x}" y="{y}" width="18" height="14" class="box {kind}"/>')
        parts.append(_text(x + 24, y + 11, text, "soft name"))
        x += 60 + 8 * len(text)
    return parts, y + 26
