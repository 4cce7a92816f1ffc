"""Sabotage a compiled kernel, and print what the simulation of each attempt says, as JSON.

Run by `test_aot_sabotage.py` inside the environment with libtpu. Each wait and each DMA of the kernel's schedule is
taken out once, and each DMA is started twice.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from attention_program import launch_of

from scripts.compiled_code.compilers import schedule_dumps
from scripts.compiled_code.scalar_core import SimulationError
from scripts.compiled_code.simulated import Launch, compile_launch, read_schedules, simulate

WAIT, COPY = "dma.done.wait", re.compile(r"= dma\.(?!done)\w+")


def attempts(text: str) -> Iterator[tuple[str, str]]:
    """Yield a name and the dump of each attempt."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        head, brace, body = line.partition("{")
        instructions = body.rpartition("}")[0].split("  ;;  ")
        for place, instruction in enumerate(instructions):
            others = instructions[:place] + instructions[place + 1 :]
            kinds = {"a wait less": WAIT in instruction, "a DMA less": COPY.search(instruction) is not None}
            found = [(kind, others) for kind, there in kinds.items() if there]
            if kinds["a DMA less"]:
                found.append(("a DMA twice", [*instructions, instruction]))
            for kind, changed in found:
                now = f"{head}{brace}{'  ;;  '.join(changed)} }}"
                yield f"{kind}, line {number}", "\n".join([*lines[:number], now, *lines[number + 1 :]])


def figures(launch: Launch, dumps: Path, target: str) -> list[float | str]:
    try:
        run = simulate(launch, read_schedules(dumps, launch.name), target)
    except (SimulationError, ValueError) as error:
        return [str(error)]
    return [run.cycles, run.moved]


if __name__ == "__main__":
    with schedule_dumps() as folder:  # before jax is imported
        target, *what = sys.argv[1].split("/")
        launch = launch_of(target, *what)
        compile_launch(launch, folder)
        (file,) = (f for f in folder.iterdir() if re.search(rf"-{launch.name}\.\d+-\d+-packed-bundles-post", f.name))
        text = file.read_text()
        print(json.dumps(["none", figures(launch, folder, target)]), flush=True)
        for name, changed in attempts(text):
            file.write_text(changed)
            print(json.dumps([name, figures(launch, folder, target)]), flush=True)
