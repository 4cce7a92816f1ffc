"""The collective operations of a compiled program, read from its text."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?[\w.\-]+ \(.*\{$")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One operation.

    Attributes:
        kind: its name in HLO.
        elements: of its largest result.
        nested: it stands in a loop or branch, not in the program itself.
        op_name: what it was lowered from, as far as the compiler kept it.
    """

    kind: str
    elements: int
    nested: bool
    op_name: str


def collectives(hlo: str) -> list[Collective]:
    """Every collective operation of a compiled program, in the order of its text; a loop's body counts once."""
    found, nested = [], False
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            nested = head.group(1) is None
        elif operation := _COLLECTIVE.search(line):
            sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in _SHAPE.findall(operation.group(1))]
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(operation.group(2), max(sizes), nested, name.group(1) if name else ""))
    return found


def as_dicts(hlo: str) -> list[dict]:
    """The same, for JSON."""
    return [asdict(collective) for collective in collectives(hlo)]
