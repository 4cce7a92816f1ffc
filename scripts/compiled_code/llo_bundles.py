"""Read a TPU kernel's final schedule, as libtpu dumps it, and find the inner loop it spends its time in.

In a ``*-final_bundles.txt`` each line is one bundle of instructions, issued in one cycle:

    0x13 LB: > { %s1 = sld [smem:[#a]]  ;;  %9 = sbr.rel (%p3) target = $region24 } /* Start region 21 */

``LB`` marks a loop's first bundle and each ``>`` a depth of loops. A branch takes effect after `DELAY` more bundles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

DELAY = 4
"""Bundles after a branch that still run, taken or not."""
GRANULE = 32
"""Bytes in which DMA sizes are counted."""

_LINE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*>*\s*\{(.*)$")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"= sbr\.rel (?:\((!?)(%\w+)\) )?target = \$region(\d+)")
_DMA = re.compile(r"%?\w+ = dma\.(hbm_to_vmem|vmem_to_hbm) ")
_SIZE = re.compile(r"/\*size_in_granules=\*/(\d+)")


@dataclass(frozen=True)
class Bundle:
    """Holds the instructions of one cycle.

    Attributes:
        regions: code regions that start here.
        target: region that a branch here goes to; None = no branch.
        predicate: condition of the branch; None = none.
        taken_if: value of the predicate with which it is taken.
        dma_bytes: bytes whose copy between HBM and VMEM starts here.
        multiplies: how many matrix products are issued here.
    """

    regions: tuple[int, ...] = ()
    target: int | None = None
    predicate: str | None = None
    taken_if: bool = True
    dma_bytes: int = 0
    multiplies: int = 0


@dataclass(frozen=True)
class Turn:
    """Counts one turn of a loop: its cycles and the bytes whose copy from or to HBM it starts."""

    cycles: int
    dma_bytes: int


@dataclass(frozen=True)
class _Path:
    """Is the rest of a turn from some bundle on."""

    dma_bytes: int
    cycles: int
    multiplies: int

    def after(self, bundles: list[Bundle]) -> _Path:
        """Return this path with some bundles before it."""
        return _Path(
            self.dma_bytes + sum(bundle.dma_bytes for bundle in bundles),
            self.cycles + len(bundles),
            self.multiplies + sum(bundle.multiplies for bundle in bundles),
        )


def parse(dump: str) -> list[Bundle]:
    """Return the bundles of a ``*-final_bundles.txt``.

    Raises:
        ValueError: when no line of it is a bundle, or a DMA's size is not a constant.
    """
    bundles = []
    for line in dump.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        text = match[2]
        branch = _BRANCH.search(text)
        starts = [part.strip() for part in text.split(";;")]
        starts = [part for part in starts if _DMA.match(part)]  # a bounds check quotes the DMA that it checks
        sizes = [_SIZE.search(part) for part in starts]
        if None in sizes:
            raise ValueError(f"a DMA whose size is not a constant: {text[:200]}")
        bundles.append(
            Bundle(
                regions=tuple(int(region) for region in _START.findall(text)),
                target=int(branch[3]) if branch else None,
                predicate=branch[2] if branch else None,
                taken_if=not (branch and branch[1]),
                dma_bytes=GRANULE * sum(int(size[1]) for size in sizes if size),
                multiplies=text.count("= vmatmul"),
            )
        )
    if not bundles:
        raise ValueError("no bundles in what should be a dump of final bundles")
    return bundles


def steady_turn(bundles: list[Bundle]) -> Turn:
    """Return one turn of the innermost loop that both starts copies and multiplies matrices.

    Among the ways through the loop's body the shortest of those that start the most copies counts: the
    kernel's steady state. A loop inside it would count as one turn.

    Raises:
        ValueError: when there is no such loop.
    """
    return _innermost(bundles, lambda turn: turn.dma_bytes and turn.multiplies, "starts copies from HBM and multiplies")


def multiplying_turn(bundles: list[Bundle]) -> Turn:
    """Return one turn of the innermost loop that multiplies matrices, whatever it copies.

    Raises:
        ValueError: when there is no such loop.
    """
    return _innermost(bundles, lambda turn: turn.multiplies, "multiplies")


def busiest_turn(bundles: list[Bundle]) -> Turn:
    """Return one turn of the shortest loop with half of the matrix products or more, the way that multiplies most.

    Raises:
        ValueError: when there is no such loop.
    """
    most = max(sum(bundle.multiplies for bundle in bundles), 1)
    turns = [(end - start, turn) for start, end, turn in _turns(bundles, _most_products) if 2 * turn.multiplies >= most]
    if not turns:
        raise ValueError("no loop with most of the matrix products")
    _, turn = min(turns, key=lambda found: found[0])
    return Turn(turn.cycles, turn.dma_bytes)


def turn_without_copies(bundles: list[Bundle]) -> Turn:
    """Return one turn of the longest loop that multiplies matrices and starts no copy, the way that multiplies most.

    Raises:
        ValueError: when there is no such loop.
    """
    found = None
    for start, end, turn in _turns(bundles, _most_products):
        copies = any(bundle.dma_bytes for bundle in bundles[start : end + 1])
        if turn.multiplies and not copies and (found is None or end - start > found[0]):
            found = end - start, turn
    if found is None:
        raise ValueError("no loop that multiplies and starts no copy")
    return Turn(found[1].cycles, 0)


def _innermost(bundles: list[Bundle], is_meant: Callable[[_Path], object], what: str) -> Turn:
    """Return one turn of the shortest loop that is meant."""
    turns = [(end - start, turn) for start, end, turn in _turns(bundles) if is_meant(turn)]
    if not turns:
        raise ValueError(f"no loop that {what}")
    _, turn = min(turns, key=lambda found: found[0])
    return Turn(turn.cycles, turn.dma_bytes)


def inner_copying_turn(bundles: list[Bundle]) -> Turn:
    """Return one turn of the longest of the loops that start copies within the loop of `last_copying_turn`.

    Raises:
        ValueError: when there is no such loop.
    """
    turns = [found for found in _turns(bundles) if found[2].dma_bytes]
    inner = [turn for start, end, turn in turns[:-1] if turns[-1][0] <= start and end <= turns[-1][1]]
    if not inner:
        raise ValueError("no loop that starts copies within another")
    longest = max(inner, key=lambda turn: turn.cycles)
    return Turn(longest.cycles, longest.dma_bytes)


def last_copying_turn(bundles: list[Bundle]) -> Turn:
    """Return one turn of the loop that starts copies and stands last in the program, the way that starts the most of
    them.

    Raises:
        ValueError: when no loop starts a copy.
    """
    turns = [turn for _, _, turn in _turns(bundles) if turn.dma_bytes]
    if not turns:
        raise ValueError("no loop that starts copies")
    return Turn(turns[-1].cycles, turns[-1].dma_bytes)


def cycles_of_grid(bundles: list[Bundle], grid: int, inner: int) -> int:
    """Return the cycles of a kernel whose outermost loop is a grid, with at most one loop within it.

    Args:
        grid, inner: turns of the two loops; a loop of one turn is none.

    Raises:
        ValueError: there are other loops than these.
    """
    loops = [(end + 1 + DELAY - start, path.cycles) for start, end, path in _turns(bundles)]
    loops.sort(reverse=True)
    if len(loops) != (grid > 1) + (inner > 1):
        raise ValueError(f"{len(loops)} loops, where a grid of {grid} with {inner} turns each has another number")
    within = (inner - 1) * loops[-1][1] if inner > 1 else 0
    if grid == 1:
        return len(bundles) + within
    size, turn = loops[0]
    return len(bundles) - size + grid * (turn + within)


def _most_copies(path: _Path) -> tuple[int, int]:
    return path.dma_bytes, -path.cycles


def _most_products(path: _Path) -> tuple[int, int]:
    return path.multiplies, -path.cycles


def _turns(
    bundles: list[Bundle], worth: Callable[[_Path], tuple[int, int]] = _most_copies
) -> Iterator[tuple[int, int, _Path]]:
    """Yield every loop's first bundle, its branch back, and its way of most worth; in the order in which loops end."""
    place = {region: i for i, bundle in enumerate(bundles) for region in bundle.regions}
    for end, bundle in enumerate(bundles):
        start = place.get(bundle.target, len(bundles)) if bundle.target is not None else len(bundles)
        if start <= end and (turn := _turn(bundles, place, start, end, worth)) is not None:
            yield start, end, turn


def _turn(
    bundles: list[Bundle], place: dict[int, int], start: int, end: int, worth: Callable[[_Path], tuple[int, int]]
) -> _Path | None:
    """Return the way of most worth from `start` to the branch back at `end`; branches on one predicate agree with each
    other."""
    uses = Counter(bundle.predicate for bundle in bundles[start : end + 1])

    @cache
    def best(first: int, known: frozenset[tuple[str, bool]]) -> _Path | None:
        at = next(i for i in range(first, end + 1) if i == end or bundles[i].target is not None)
        if at == end:
            return _Path(0, 0, 0).after(bundles[first : end + 1 + DELAY])
        branch = bundles[at]
        goal = place.get(branch.target, start)
        ways = []
        for taken in (True, False):
            value = branch.taken_if == taken
            if (branch.predicate, not value) in known or (branch.predicate is None and not taken):
                continue
            if taken and not at < goal <= end:
                continue  # leaves the loop, or turns an inner one again
            learnt = {(branch.predicate, value)} if uses[branch.predicate] > 1 else set()
            then = best(goal if taken else at + 1, known | learnt)
            if then is not None:
                ways.append(then.after(bundles[first : at + 1 + (DELAY if taken else 0)]))
        return max(ways, key=worth, default=None)

    return best(start, frozenset())
