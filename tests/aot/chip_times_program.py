"""Compile the programs that `chip_times` would time on a TPU, and print what a turn of their loops runs, as JSON.

Run by `test_aot_chip_times.py` inside the environment with libtpu, with the name of a chip.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from scripts.compiled_code.compilers import schedule_dumps

if __name__ == "__main__":
    with schedule_dumps():  # before jax is imported
        import jax

        from scripts.compiled_code.chip_times import LAUNCHES, TURNS, repeated
        from scripts.compiled_code.layer_ops import loop_opcodes

        for name, make in LAUNCHES.items():
            launch = make(sys.argv[1])
            run = partial(repeated, launch.function, launch.donated, TURNS + 1)
            with jax.set_mesh(launch.arguments[0].sharding.mesh):
                lowered = jax.jit(run, donate_argnums=range(len(launch.arguments))).lower(*launch.arguments)
            print(json.dumps([name, loop_opcodes(lowered.compile().as_text())]), flush=True)
