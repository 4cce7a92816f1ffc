"""Keeps the GPU attention kernels' tiles that were measured, by chip and shape, and finds better ones.

`gpu_shapes` has rules for every chip. After a tuner has run on a chip, ``gpu_tiles.json`` next to this file holds the
fastest tiles there: by the chip's name, and by kernel, query heads of a KV head, lanes of a head, bytes of a number and
rows of a tile. Nothing has been measured yet, so the file is empty. A chip that it does not name uses the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from pallas_kernels.gpu_launch import chip_name
from pallas_kernels.paged_attention.gpu_shapes import Tiles

Kernel: TypeAlias = Literal["decode", "prefill"]
Table: TypeAlias = dict[str, dict[str, Tiles]]
"""Tiles by the name of a chip, and then by `key_of` a shape."""

FILE = Path(__file__).with_name("gpu_tiles.json")
KEYS, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)
GAIN = 0.98
"""New tiles replace the best so far if they take less than this share of its time; a smaller gain is noise."""

_asked: ContextVar[Tiles | None] = ContextVar("tiles", default=None)


def key_of(kernel: Kernel, group: int, width: int, itemsize: int, rows: int) -> str:
    """Return the table's key for a shape; `rows` are those of the rules' tile, which follow from the longest run."""
    return f"{kernel}, {group} query heads, {width} lanes, {itemsize} bytes, {rows} rows"


def measured_tiles(kernel: Kernel, group: int, width: int, itemsize: int, rules: Tiles) -> Tiles:
    """Return the tiles measured fastest on the chip compiled for, or the rules' tiles if there are none."""
    if (asked := _asked.get()) is not None:
        return asked
    return read(FILE).get(chip_name(), {}).get(key_of(kernel, group, width, itemsize, rules.rows), rules)


@contextmanager
def with_tiles(tiles: Tiles) -> Iterator[None]:
    """Trace all attention kernels with these tiles."""
    token = _asked.set(tiles)
    try:
        yield
    finally:
        _asked.reset(token)


def candidates(rules: Tiles) -> list[Tiles]:
    """Return tiles of the rules' rows with all numbers of keys, warps and stages that are worth trying, the rules' own
    first."""
    others = [Tiles(rules.rows, keys, warps, stages) for keys in KEYS for warps in WARPS for stages in STAGES]
    return [rules, *(tiles for tiles in others if tiles != rules)]


def fastest(
    rules: Tiles, seconds_of: Callable[[Tiles], float], *, more_time: Callable[[], bool] = lambda: True
) -> Tiles:
    """Return the fastest of the candidates, or the rules' tiles where none is faster by more than noise.

    Args:
        seconds_of: measures a kernel with some tiles; an exception drops them, as where they do not fit the chip.
        more_time: called before each candidate except the rules' own; False ends the search.

    Raises:
        Exception: what `seconds_of` raises for the rules' own tiles.
    """
    best, limit = rules, GAIN * seconds_of(rules)
    for tiles in candidates(rules)[1:]:
        if not more_time():
            break
        try:
            seconds = seconds_of(tiles)
        except Exception:  # too much shared memory or too many registers: the compiler says it in many ways
            continue
        if seconds < limit:
            best, limit = tiles, seconds
    return best


def read(file: Path) -> Table:
    """Return the table of a file.

    Raises:
        ValueError: an entry is not four positive whole numbers, rows, keys, warps and stages.
    """
    return _read(file, file.stat().st_mtime_ns)


@cache
def _read(file: Path, changed: int) -> Table:
    table: Table = {}
    for chip, shapes in json.loads(file.read_text(encoding="utf-8")).items():
        for key, numbers in shapes.items():
            if len(numbers) != len(Tiles._fields) or not all(isinstance(n, int) and n > 0 for n in numbers):
                raise ValueError(f"{file}: {numbers} of {chip!r}, {key!r} are not rows, keys, warps and stages")
            table.setdefault(chip, {})[key] = Tiles(*numbers)
    return table


def add(file: Path, chip: str, measured: Mapping[str, Tiles]) -> None:
    """Add a chip's measured tiles to a file's table; they replace its entries of the same shapes."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    table[chip] = table.get(chip, {}) | {key: list(tiles) for key, tiles in measured.items()}
    ordered = {name: dict(sorted(table[name].items())) for name in sorted(table)}
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
