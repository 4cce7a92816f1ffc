"""Counts the machine instructions (SASS) of an NVIDIA GPU's kernel, and the programs that a multiprocessor holds.

nvdisasm and cuobjdump come with Triton's wheel; neither needs a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
"""Products of the matrix units, from sm_75 to sm_100."""

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@\S+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_TARGET = re.compile(r"^(.*)`\((\.L_x_\d+)\)")


@dataclass
class Block:
    """Instructions that follow one another without a branch between, and the blocks that may follow, by number."""

    names: Counter[str] = field(default_factory=Counter)
    after: list[int] = field(default_factory=list)


def read_sass(text: str) -> list[Block]:
    """Return the blocks of a kernel that nvdisasm wrote.

    Threads of a warp are taken to stay together: where they do not (BRA.DIV) the other path is not followed.
    """
    blocks, labels, branches = [Block()], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].names:
                blocks[-1].after.append(len(blocks))
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif instruction := _INSTRUCTION.match(line):
            condition, name, rest = instruction.groups()
            blocks[-1].names[name.split(".")[0]] += 1
            target = _TARGET.match(rest) if name.split(".")[0] == "BRA" and ".DIV" not in name else None
            if target is None and name not in ("EXIT", "RET", "RET.REL.NODEC"):
                continue
            if target is not None:
                branches.append((len(blocks) - 1, target[2]))
            if condition or (target is not None and target[1].strip()):  # a condition may be an operand
                blocks[-1].after.append(len(blocks))
            blocks.append(Block())
    for number, label in branches:
        blocks[number].after.append(labels[label])
    return blocks


def main_loop(blocks: list[Block]) -> Counter[str]:
    """Return how often each instruction stands in the main loop: in that with the most matrix products, or, if there
    are none, with the most float32 products; of nested ones in the innermost.

    Raises:
        ValueError: the kernel has no loop.
    """
    bodies = [sum((blocks[number].names for number in body), Counter()) for body in _loops(blocks)]
    if not bodies:
        raise ValueError(f"no loop in {len(blocks)} blocks of instructions")
    products = [sum(body[name] for name in MATRIX) for body in bodies]
    if not any(products):
        products = [body["FFMA"] + body["HFMA2"] for body in bodies]
    most = max(products)
    return min((body for body, count in zip(bodies, products, strict=True) if count == most), key=Counter.total)


def _loops(blocks: list[Block]) -> Iterator[set[int]]:
    """Yield the blocks of each natural loop (Aho, Lam, Sethi and Ullman, Compilers, section 9.6.6)."""
    before: dict[int, set[int]] = {number: set() for number in range(len(blocks))}
    for number, block in enumerate(blocks):
        for after in block.after:
            before[after].add(number)
    reached, ahead = set(), [0]
    while ahead:
        if (number := ahead.pop()) not in reached:
            reached.add(number)
            ahead += blocks[number].after
    dominators = {number: set(reached) for number in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for number in reached - {0}:
            new = set.intersection(*(dominators[one] for one in before[number] & reached)) | {number}
            changed |= new != dominators[number]
            dominators[number] = new
    for last in reached:
        for head in dominators[last].intersection(blocks[last].after):
            body, ahead = {head}, [last]
            while ahead:
                if (number := ahead.pop()) not in body:
                    body.add(number)
                    ahead += before[number] & reached
            yield body


def disassemble(cubin: bytes) -> list[Block]:
    """Return the blocks of a cubin with one kernel."""
    return read_sass(_run("nvdisasm", cubin, "-c"))


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and the bytes that it spills."""
    text = _run("cuobjdump", cubin, "-res-usage")
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local}


def _run(tool: str, cubin: bytes, option: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Multiprocessor:
    """Says what a multiprocessor has: warps, programs, shared memory in bytes, and what of that each program takes for
    the system (CUDA C++ Programming Guide, table of technical specifications by compute capability)."""

    warps: int
    programs: int
    shared: int
    taken: int = 1024
    registers: int = 65536

    def occupancy(self, *, registers: int, shared: int, warps: int) -> float:
        """Return the share of its warps that run where programs of `warps` warps take so much; 0 where none fits."""
        each = -(-registers * 32 // 256) * 256  # a warp's registers are given out by 256
        of_registers = self.registers // 4 // each * 4 // warps  # and live in one of four parts
        programs = min(self.programs, self.warps // warps, of_registers, self.shared // (shared + self.taken))
        return programs * warps / self.warps


MULTIPROCESSORS = {
    75: Multiprocessor(32, 16, 64 << 10, taken=0),
    80: Multiprocessor(64, 32, 164 << 10),
    86: Multiprocessor(48, 16, 100 << 10),
    89: Multiprocessor(48, 24, 100 << 10),
    90: Multiprocessor(64, 32, 228 << 10),
    100: Multiprocessor(64, 32, 228 << 10),
}
"""By compute capability."""
