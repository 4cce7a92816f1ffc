"""Sabotage a compiled kernel, and print what the simulation of each attempt says, as JSON.

Run by `test_aot_sabotage.py` inside the environment with libtpu. Each wait and each DMA of the kernel's schedule is
taken out once; each DMA is started twice, and each wait waits for more than comes.
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

WAIT, COPY = re.compile(r"dma\.done\.wait ([^,]*(?:\),)?[^,]*),"), re.compile(r"= dma\.(?!done)\w+")


def attempts(text: str) -> Iterator[tuple[str, str]]:
    """Yield a name and the dump of each attempt. A wait is two instructions: the second takes from the semaphore."""
    bundles = [line.partition("{") for line in text.splitlines()]
    instructions = [body.rpartition("}")[0].strip().split("  ;;  ") for _, _, body in bundles]
    places = [(line, place) for line, found in enumerate(instructions) for place in range(len(found))]

    def changed(instead: dict[tuple[int, int], list[str]]) -> str:
        lines = []
        for number, ((head, brace, _), found) in enumerate(zip(bundles, instructions, strict=True)):
            kept = [x for place, text in enumerate(found) for x in instead.get((number, place), [text])]
            lines.append(f"{head}{brace} {'  ;;  '.join(kept)} }}" if brace else head)
        return "\n".join(lines)

    for at, (line, place) in enumerate(places):
        instruction = instructions[line][place]
        if wait := WAIT.search(instruction):
            taken = f"vsyncadd {wait[1]},"
            end = next(later for later in places[at:] if taken in instructions[later[0]][later[1]])
            yield f"a wait less, line {line}", changed({(line, place): [], end: []})
            more = re.sub(r", (\d+)$", lambda amount: f", {int(amount[1]) + 1}", instruction)
            assert more != instruction, instruction
            yield f"a wait longer, line {line}", changed({(line, place): [more]})
        elif COPY.search(instruction):
            yield f"a DMA less, line {line}", changed({(line, place): []})
            yield f"a DMA twice, line {line}", changed({(line, place): [instruction] * 2})


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
