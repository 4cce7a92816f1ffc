"""Counts the bytes that a compiled GPU program moves, in its optimised HLO: operands and results of each operation.

An operation of the program is a kernel or a library's call, which reads its operands from memory and writes its results
there; what a fusion has inside it stays in registers. Of an operand that is only sliced or gathered from, the slices
are counted, and of an array that is updated in place, the updates. Each turn of a loop counts. Not counted are the
scratch memory of cuBLAS, and arrays that the caller names: a pool, of which only the caller knows what is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
}
_BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier"}
_CALLS = {"call", "async-start"}
_PICKS = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change an array in place, and which operand has what is new."""


@dataclass(frozen=True)
class Instruction:
    """Is a line of HLO.

    Attributes:
        arrays: dtype and shape of each array of its result.
        given: what stands between the brackets: operands, or a parameter's number.
        rest: what follows the operands: attributes, and what the compiler noted.
    """

    name: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    given: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Return the bytes of the result."""
        return sum(size_of(*array) for array in self.arrays)

    def calls(self, key: str) -> str:
        """Return the name of a computation that an attribute names."""
        found = re.search(rf"{key}=%?([\w.\-]+)", self.rest)
        assert found is not None, (key, self.name, self.rest[:200])
        return found[1]


Computation = Mapping[str, Instruction]


@dataclass
class Moved:
    """Adds up bytes, by the name of what moves them."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    operations: int = 0

    def add(self, kind: str, count: int, times: int) -> None:
        self.total += count * times
        self.operations += times
        self.by_kind[kind] = self.by_kind.get(kind, 0) + count * times


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array; tokens and the like have none."""
    return -(-math.prod(shape) * _BITS.get(dtype, 0) // 8)


def moved_bytes(hlo: str, *, pool_bytes: int = 0) -> Moved:
    """Return what a program moves.

    Args:
        hlo: the text of a compiled program.
        pool_bytes: arrays of just this size are not counted.

    Raises:
        ValueError: a loop whose number of turns the compiler does not know.
    """
    computations, entry = parse(hlo)
    moved = Moved()
    _count(entry, computations, moved, 1, pool_bytes)
    return moved


def parse(hlo: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a program by name, and the name of the one that it runs."""
    found: dict[str, dict[str, Instruction]] = {}
    entry, lines = "", None
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = found.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None and (made := _instruction(line.strip())) is not None:
            lines[made.name] = made
    assert entry, "no entry computation"
    return dict(found), entry


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    opcode = re.search(r"(?:^|[\s)}])([a-z][\w\-]*)\(", rest)
    assert opcode is not None, line
    end = _closing(rest, opcode.end() - 1)
    arrays = tuple(_arrays(rest[: opcode.start(1)]))
    given = rest[opcode.end() : end]
    operands = tuple(re.findall(r"%([\w.\-]+)", given))
    return Instruction(head[2], arrays, opcode[1], given, operands, rest[end:], bool(head[1]))


def _closing(text: str, at: int) -> int:
    """Return the place of the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"no closing bracket in {text[at : at + 80]!r}")


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    found = _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", text))  # without layouts
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found if dtype in _BITS]


def _count(name: str, computations: Mapping[str, Computation], moved: Moved, times: int, pool: int) -> None:
    body = computations[name]
    for op in body.values():
        if is_free(op):
            continue
        if op.opcode in _CALLS:
            _count(op.calls("calls" if "calls=" in op.rest else "to_apply"), computations, moved, times, pool)
        elif op.opcode == "while":
            _count(op.calls("body"), computations, moved, times * _turns(op), pool)
        elif op.opcode == "conditional":
            _count(_longest_branch(op, computations, pool), computations, moved, times, pool)
        else:
            moved.add(kind_of(op), _of_operation(op, body, computations, pool), times)


def _turns(loop: Instruction) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if known is None:
        raise ValueError(f"{loop.name}: a loop of which the compiler does not know how often it turns")
    return int(known[1])


def _longest_branch(op: Instruction, computations: Mapping[str, Computation], pool: int) -> str:
    several = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
    names = re.findall(r"%?([\w.\-]+)", several[1]) if several else [op.calls("true_computation")]
    names += [] if several else [op.calls("false_computation")]

    def length(name: str) -> int:
        moved = Moved()
        _count(name, computations, moved, 1, pool)
        return moved.total

    return max(names, key=length)


def is_free(op: Instruction) -> bool:
    """Tell whether an instruction runs nothing."""
    return op.opcode in _FREE or op.opcode.endswith(("-done", "-update"))


def kind_of(op: Instruction) -> str:
    """Return what an operation is called in a table: a fusion by its kind, a call by what it calls."""
    if op.opcode == "custom-call":
        found = re.search(r'custom_call_target="([^"]*)"', op.rest)
        return found[1] if found else "custom-call"
    if op.opcode == "fusion":
        return "product in a fusion" if "__triton" in op.rest and "gemm" in op.rest else "fusion"
    return op.opcode


def _of_operation(op: Instruction, body: Computation, computations: Mapping[str, Computation], pool: int) -> int:
    def whole(name: str) -> int:
        return _but_pool(body[name].bytes, pool)

    if op.opcode == "fusion":
        inner = computations[op.calls("calls")]
        parameters = {int(i.given): i.name for i in inner.values() if i.opcode == "parameter"}
        reads = sum(_but_pool(_read_of(parameters[n], inner), pool) for n in range(len(op.operands)))
        (root,) = (i for i in inner.values() if i.is_root)
        return reads + _written(root, inner, pool)
    if op.opcode in _PICKS:
        return 2 * op.bytes + sum(whole(name) for name in op.operands[1:])
    if op.opcode in _UPDATES:
        return 2 * whole(op.operands[_UPDATES[op.opcode]])
    results = op.arrays[:1] if "__cublas" in op.rest else op.arrays  # a product's second result is its scratch memory
    written = sum(_but_pool(size_of(*array), pool) for array in results)
    return sum(whole(name) for name in op.operands) + written


def _but_pool(count: int, pool: int) -> int:
    return 0 if count == pool else count


def _read_of(name: str, body: Computation) -> int:
    """Return the bytes that a fusion reads of its parameter."""
    users = [op for op in body.values() if name in op.operands]
    total = 0
    for user in users:
        if user.opcode in _PICKS and user.operands[0] == name:
            total += user.bytes
        elif user.opcode in _UPDATES and user.operands[0] == name:
            total += 0
        elif user.opcode in ("bitcast", "reshape") and not user.is_root:
            total += _read_of(user.name, body)
        else:
            return body[name].bytes
    return min(total, body[name].bytes)


def _written(root: Instruction, body: Computation, pool: int) -> int:
    """Return the bytes that a fusion writes: of results that are updated in place, the updates."""
    if root.opcode == "tuple":
        return sum(_written(body[name], body, pool) for name in root.operands)
    if root.opcode in _UPDATES:
        return body[root.operands[_UPDATES[root.opcode]]].bytes
    if root.opcode in ("bitcast", "reshape") and root.operands:
        return _written(body[root.operands[0]], body, pool)
    return _but_pool(root.bytes, pool)


def largest_result(hlo: str, *, pool_bytes: int = 0) -> int:
    """Return the bytes of the largest float array that an operation of a program writes; see `moved_bytes`."""
    computations, _ = parse(hlo)
    inner = {op.calls("calls") for body in computations.values() for op in body.values() if op.opcode == "fusion"}
    sizes = [0]
    for name, body in computations.items():
        made = [op for op in body.values() if name not in inner and op.opcode not in _FREE]
        floats = [array for op in made for array in op.arrays if "f" in array[0]]
        sizes += [size for array in floats if (size := size_of(*array)) != pool_bytes]
    return max(sizes)
