"""Checks whether jpaged is right and fast on this NVIDIA GPU; results go to gpu_check.json.

    python -m scripts.benchmarks.gpu_check                            everything
    python -m scripts.benchmarks.gpu_check --minutes 9                starts no part later; the next call continues
    python -m scripts.benchmarks.gpu_check --only attention decode    parts by name, which --list prints

Needs `pip install -e ".[cuda13]"` (or cuda12) and about 70 GB of GPU memory; 8 GB without the parts of the engine. The
parts run in the order of what they tell in case there is not time for all: first whether each kernel is right, against
float64 or its reference on fresh random inputs (attention, KV write and rotation; products with codes of int4, MXFP4,
int8 and float8; experts; recurrent states and latent attention); then how fast attention, KV write and block copy are
against the GPU's copy bandwidth and products; then a Llama-3.1-8B of random weights end to end, at 64, 1 and 256
sequences; then XLA's kernels, JAX's own paged attention and torch for comparison; last the tiles of attention are tuned
for this GPU (`pallas_kernels/paged_attention/gpu_tiles.json`).

Every line is written to the file of results as soon as it is known, and what is there already, from the same GPU and
versions, is not done again: keep the file between calls. What fails is a finding: its line says why, and the next part
follows.

Goals: no check fails; decode attention reaches 0.85 of the copy bandwidth; a decode step takes 1.25 times what reading
weights and KV once takes; the device waits for the host less than 3 % of the time; `jpaged plan` is within 15 % of the
memory. Exit status 1 when a check or a part fails.

Status: this script has never run on a GPU, so no figure of it is known yet. Its parts run on CPU in the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU
os.environ.setdefault("PALLAS_KERNELS_GPU", "triton")  # the kernels that are to be checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None, help="begin nothing later than this (default: no limit)")
    parser.add_argument("--only", nargs="+", metavar="PART", default=None, help="parts to run (default: all)")
    parser.add_argument("--kernels-only", action="store_true", help="leave the engine out")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    parser.add_argument("--results", type=Path, default=ROOT / "gpu_check.json", help="file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the checks' inputs (default: fresh ones)")
    args = parser.parse_args()

    from scripts.benchmarks.gpu_check.parts import ENGINE, PARTS, Check

    names = [name for name in PARTS if not (args.kernels_only and name in ENGINE)]
    if args.only is not None:
        unknown = sorted(set(args.only) - set(PARTS))
        if unknown:
            parser.error(f"--only {' '.join(unknown)}: the parts are {', '.join(PARTS)}")
        names = [name for name in names if name in args.only]
    if args.list:
        print("\n".join(f"{name}: {PARTS[name].__doc__}" for name in names))
        return 0

    import jax

    from jpaged.execution.device_memory import claim_gpu_share

    claim_gpu_share()  # before JAX opens the GPU: `jpaged plan` counts with it, and so does an engine
    if jax.default_backend() != "gpu":
        print(f"gpu_check needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here", file=sys.stderr)
        return 2

    check = Check.open(args.results, seed=args.seed, minutes=args.minutes)
    check.run(names)
    return 0 if check.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
