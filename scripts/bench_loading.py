"""Compares loading a model from its source with loading the checkpoint that `jpaged convert` makes of it.

    python scripts/bench_loading.py [MODEL] [--runs 9]

Every run is a fresh process, source and checkpoint by turns, with their files in the page cache. "weights" is the time
from the opened files to arrays on the devices, "model" that of a second load with config and tokenizer, whose imports
are done by then. Printed are medians, and how much faster the checkpoint is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(name: str) -> dict[str, float]:
    """Measure the seconds of loading in this process."""
    import jax
    import numpy as np

    from jpaged.loading import load_model
    from jpaged.loading.build_context import build_context
    from jpaged.loading.open_checkpoint import open_model
    from jpaged.loading.orbax.checkpoint import OrbaxWeights, restore_params
    from jpaged.loading.parameters.weights import load_params
    from jpaged.model_api import TENSOR_AXIS

    opened = open_model(name)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    load = restore_params if isinstance(opened.reader, OrbaxWeights) else load_params
    start, cpu = time.perf_counter(), time.process_time()
    build = build_context(mesh, np.float32, stacked=False)
    _, _, params = load(opened.family, opened.config, opened.reader, build, mesh=mesh)
    jax.block_until_ready(params)
    weights, weights_cpu = time.perf_counter() - start, time.process_time() - cpu
    del params
    start = time.perf_counter()
    jax.block_until_ready(load_model(name, dtype="float32").params)
    return {"weights": weights, "weights, CPU time": weights_cpu, "model": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=9, help="of each")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.model)))
        return
    from jpaged.loading import convert_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoint")
        convert_checkpoint(arguments.model, checkpoint, dtype="float32")
        runs: dict[str, list[dict[str, float]]] = {arguments.model: [], checkpoint: []}
        for _ in range(arguments.runs + 1):
            for name, found in runs.items():
                command = [sys.executable, __file__, name, "--measure"]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    source, saved = (found[1:] for found in runs.values())
    for part in source[0]:
        before, after = ([run[part] for run in runs] for runs in (source, saved))
        ratio = statistics.median(before) / statistics.median(after)
        print(
            f"{part}: {statistics.median(before):.2f} s from the source ({min(before):.2f} to {max(before):.2f}), "
            f"{statistics.median(after):.2f} s from the checkpoint ({min(after):.2f} to {max(after):.2f}): {ratio:.1f}x"
        )


if __name__ == "__main__":
    main()
