"""Counts what a compiled TPU step runs once a layer: the operations and estimated cycles of its longest loop's body.

The compiler writes an estimate next to most operations (``estimated_cycles``); kernels, sorts and all-reduces have none
and count as 0, and the time that DMAs take is in none of them. Kernels that stand where XLA would have operations of
its own are counted as `ROW_KERNELS` says, so that nothing gets cheaper by leaving the compiler's estimate. Products of
experts are counted as long as HBM takes to deliver all experts' matrices; `tpu-experts` simulates how long they take.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_FREE = ("get-tuple-element", "parameter", "bitcast", "tuple", "constant")
_COPIES = ("copy-start", "copy-done", "slice-start", "slice-done")
_ROTATION = "tkrd,de->tkre"
"""The one product of a layer that is none with weights, by its name: see `models.rope.rotate_by_product`."""

LAUNCH = 1_800
"""Cycles of an operation apart from its work: the compiler's estimate for operations that do hardly any."""
ROW_KERNELS = {"add_rms_norm": 12, "rms_norm": 10, "normed_rotated_heads": 46, "rotated_heads": 21, "route": 494}
"""Cycles that no kernel's bundles exceed for 16 x 128 numbers of what it is given first, by `tpu-rows`."""

_LEAST_NUMBERS = {"route": 128 * 128}
"""Numbers that a kernel takes as long for as for fewer: those of its tile."""

PRODUCT_KERNELS = ("expert_mlps", "ragged-dot-none")
"""Kernels of experts' products, by their names in HLO; their operands of three or more dimensions are matrices."""


class Operation(NamedTuple):
    """An instruction of a loop's body: its opcode, operands, estimated cycles and text."""

    opcode: str
    operands: list[str]
    cycles: int
    text: str
    is_root: bool


def layer_ops(hlo: str, hbm: float | None = None) -> dict[str, int]:
    """Return the body's ``operations``, ``cycles``, ``sorts``, ``gathers``, the cycles of ``products`` with weights and
    of ``row kernels``, which are among all cycles, and how many operations are ``the same for all layers``, as they
    need nothing that changes in the loop.

    ``copies`` between a TPU's memories, which DMA engines make while other operations run, are none of them.

    Args:
        hbm: bytes that HBM delivers in a cycle; None = products of experts are not counted.
    """
    body = _longest_body(hlo)
    operations = dict(filter(None, map(_parse, body)))
    changing = _changing(operations)
    real = {name: op for name, op in operations.items() if not _is_free(op)}
    row_kernels = sum(_row_kernel(name, op, body) for name, op in real.items())
    experts = 0 if hbm is None else sum(_experts(name, op, body, hbm) for name, op in real.items())
    products = [op for op in real.values() if "dot_general" in op.text and op.opcode == "fusion"]
    return {
        "operations": len(real),
        "cycles": sum(op.cycles for op in real.values()) + row_kernels + experts,
        "row kernels": row_kernels,
        "products": sum(op.cycles for op in products if _ROTATION not in op.text) + experts,
        "sorts": sum(op.opcode == "sort" for op in real.values()),
        "gathers": sum(op.opcode == "gather" or name.startswith("gather") for name, op in real.items()),
        "copies": sum(op.opcode in ("copy-start", "slice-start") for op in operations.values()),
        "the same for all layers": sum(name not in changing for name in real),
    }


def loop_opcodes(hlo: str) -> list[str]:
    """Return the opcodes of what the body of a program's longest loop runs."""
    return [op.opcode for _, op in filter(None, map(_parse, _longest_body(hlo))) if not _is_free(op)]


def _longest_body(hlo: str) -> list[str]:
    bodies = _computations(hlo)
    return max((bodies.get(name, []) for name in re.findall(r"body=%?([\w.\-]+)", hlo)), key=len)


def estimated_cycles(hlo: str) -> tuple[int, int]:
    """Return how many operations a program without loops runs besides kernels, and their estimated cycles."""
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", hlo, re.MULTILINE)
    assert entry is not None, "no entry computation"
    operations = [found[1] for found in map(_parse, _computations(hlo)[entry[1]]) if found]
    real = [op for op in operations if not _is_free(op) and op.opcode != "custom-call"]
    return len(real), sum(op.cycles for op in real)


def product_cycles(hlo: str) -> int:
    """Return the estimated cycles of a program's products, without copies of what they return."""
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", hlo, re.MULTILINE)
    assert entry is not None, "no entry computation"
    operations = [found[1] for found in map(_parse, _computations(hlo)[entry[1]]) if found]
    return sum(op.cycles for op in operations if op.opcode == "fusion" and "dot_general" in op.text)


def _row_kernel(name: str, op: Operation, body: list[str]) -> int:
    """Return what `ROW_KERNELS` says of a call of one of them, 0 for what is none."""
    kernel = name.split(".")[0]
    if op.opcode != "custom-call" or kernel not in ROW_KERNELS:
        return 0
    given = (line for name in op.operands for line in body if re.match(rf"%{re.escape(name)} = ", line))
    rows = next(line for line in given if not re.match(r"%\S+ = s32", line))  # numbers of layers come before
    shape = re.search(r"\[([\d,]+)\]", rows)
    assert shape is not None, rows
    return row_kernel_cycles(kernel, math.prod(map(int, shape[1].split(","))))


def row_kernel_cycles(kernel: str, numbers: int) -> int:
    """Return the cycles that a kernel of `ROW_KERNELS` counts as, if what it is given first has so many numbers."""
    return LAUNCH + ROW_KERNELS[kernel] * max(numbers, _LEAST_NUMBERS.get(kernel, 0)) // (16 * 128)


def _is_free(op: Operation) -> bool:
    """Tell whether an instruction runs nothing, or only DMAs; slices that were copied one by one need no joining."""
    return op.opcode in _FREE + _COPIES or '"ConcatBitcast"' in op.text


def _experts(name: str, op: Operation, body: list[str], hbm: float) -> int:
    """Return the cycles of a kernel in `PRODUCT_KERNELS`, 0 of what is none."""
    if op.opcode != "custom-call" or name.split(".")[0] not in PRODUCT_KERNELS:
        return 0
    given = [line for name in op.operands for line in body if re.match(rf"%{re.escape(name)} = ", line)]
    shapes = [re.match(r"%\S+ = bf16\[([\d,]+)\]", line) for line in given]
    tables = [list(map(int, shape[1].split(","))) for shape in shapes if shape and shape[1].count(",") >= 2]
    numbers = sum(math.prod(table[-3:]) for table in tables)  # before an expert's come those of all layers
    return LAUNCH + round(2 * numbers / hbm)


def _computations(hlo: str) -> dict[str, list[str]]:
    """Return the lines of each computation of a program."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            lines = found.setdefault(head[1], [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line.strip())
    return found


def _parse(line: str) -> tuple[str, Operation] | None:
    head = re.match(r"(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    opcode = re.search(r"(?:^|[\s)}])([a-z][\w\-]*)\(", rest)
    assert opcode is not None, line
    cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
    operands = re.findall(r"%([\w.\-]+)", rest.split("metadata")[0])
    return head[2], Operation(opcode[1], operands, int(cycles[1]) if cycles else 0, line, bool(head[1]))


def _changing(operations: dict[str, Operation]) -> set[str]:
    """Return the names of what is not the same in every turn of the loop."""
    (root,) = (op for op in operations.values() if op.is_root)
    (parameter,) = (name for name, op in operations.items() if op.opcode == "parameter")
    index = {}
    for name, op in operations.items():
        found = re.search(r"index=(\d+)", op.text)
        if op.opcode == "get-tuple-element" and parameter in op.operands and found:
            index[name] = int(found[1])
    results = [name for name in root.operands if name in operations]
    kept = {place for place, name in enumerate(results) if index.get(name) == place}
    changing = {name for name, place in index.items() if place not in kept}
    for name, op in operations.items():  # operands stand before their uses
        if name not in index and name != parameter and changing.intersection(op.operands):
            changing.add(name)
    return changing
