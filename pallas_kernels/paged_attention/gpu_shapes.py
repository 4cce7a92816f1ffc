"""Chooses the GPU attention kernels' launch shapes: every number that could be tuned, by shape.

The rules were chosen by reasoning, from the shared memory and registers that the compiler reports, and have not been
tuned on a GPU. All fit the 99 KB of shared memory that every GPU from sm_80 on has.

After a tuner has run on a chip, ``gpu_tiles.json`` next to this file holds the fastest tiles there: by the chip's name,
and by kernel, query heads of a KV head, lanes of a head, bytes of a number and rows of a tile. Nothing has been
measured yet, so the file is empty. A chip that it does not name uses the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from pallas_kernels.gpu_launch import chip_name

MAX_WIDTH = 256
"""Widest head, in lanes."""
MAX_UNITS = 2048
"""Decode units of a batch whose sequences all fill their block tables; their partial results are kept in memory."""
MIN_UNIT = 256
"""Keys of the shortest decode unit: at 8 KV heads of 128 a quarter of a MiB of bfloat16, 4 pipelined tiles."""
PROGRAMS = 2048
"""Decode programs: about 4 rounds of the 4 that each of an H100's 132 multiprocessors holds at once."""
JOINED = 16
"""Units that the second pass reads at once."""


class Tiles(NamedTuple):
    """Says how many rows and keys one product has, and how a program runs it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int, width: int, itemsize: int, *, matrix_units: bool = True) -> Tiles:
    """Return the tiles of a decode, whose rows are the `group` query heads of a KV head; tensor cores need at least 16.

    Two tiles of K and V are in flight: 64 KiB a program, 3 programs a multiprocessor on an H100.
    Without matrix units padding rows cost as much as others, and each thread holds its operands in registers.
    """
    if not matrix_units:
        return Tiles(
            _next_power_of_two(group), min(32, 4096 // width), num_warps=4 if width <= 128 else 8, num_stages=1
        )
    return Tiles(max(16, _next_power_of_two(group)), _keys(width, itemsize), num_warps=4, num_stages=3)


def prefill_tiles(
    group: int, width: int, itemsize: int, longest: int, *, in_bytes: bool = False, matrix_units: bool = True
) -> Tiles:
    """Return the tiles of a prefill, whose rows are (query, query head) pairs: as many as registers hold, fewer when no
    sequence has so many.

    Products of float32 take three passes of the tensor cores and a multiple of the registers. More than 32 keys
    spill registers on sm_80 and sm_100, as do more than half the rows if K and V are unpacked from bytes.
    """
    if not matrix_units:
        return Tiles(max(16, _next_power_of_two(group)), 16, num_warps=4 if width <= 128 else 8, num_stages=1)
    half = itemsize == 2
    most = min(128, 16384 // width) // (1 + in_bytes) if half else min(32, 2048 // width)
    rows = max(16, min(most, _next_power_of_two(group * longest)), _next_power_of_two(group))
    return Tiles(
        rows,
        min(32, _keys(width, itemsize)),
        num_warps=8 if half and rows >= (32 if in_bytes else 64) else 4,
        num_stages=3 if half and width <= 128 else 2,
    )


def decode_unit(seqs: int, capacity: int) -> int:
    """Return how many keys a decode unit has: so many that `seqs` block tables of `capacity` tokens are `MAX_UNITS`
    units or fewer.

    It depends on shapes alone, so that a sequence is cut in the same way in every batch.
    """
    return max(MIN_UNIT, _next_power_of_two(-(-seqs * capacity // MAX_UNITS)))


def seq_lanes(seqs: int) -> int:
    """Return the number of lanes over the sequences: a power of two, alike for all small batches, which then share a
    kernel's code."""
    return max(32, _next_power_of_two(seqs))


def _keys(width: int, itemsize: int) -> int:
    """Return the number of keys whose K takes 16 KiB: 64 at most, 32 of float32, whose products take more registers."""
    return max(16, min(128 // itemsize, 16 * 1024 // (width * itemsize)))


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


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
