"""Checks whether jpaged is right and fast on this NVIDIA GPU; results go to docs/performance.json and .md.

    python scripts/gpu_check.py [--kernels-only] [--seed N]

Needs `pip install -e ".[cuda13]"` (or cuda12) and about 40 GB of GPU memory; 8 GB with --kernels-only. It checks every
kernel against float64 or its reference on fresh random inputs, measures attention, KV write and block copy against the
GPU's copy bandwidth and matrix products, beside the XLA path, JAX's own paged attention and torch, then runs a
Llama-3.1-8B of random weights end to end.

Goals: no check fails; decode attention reaches 0.85 of the copy bandwidth; a decode step takes 1.25 times what reading
weights and KV once takes; the device waits for the host less than 3 % of the time. Exit status 1 when a check fails.

Status: this script has never run on a GPU, so no figure of it is known yet. Its parts run on CPU in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels-only", action="store_true", help="leave the engine out")
    parser.add_argument("--seed", type=int, default=None, help="of the checks' inputs (default: fresh ones)")
    args = parser.parse_args()

    import jax

    if jax.default_backend() != "gpu":
        print(f"gpu_check needs an NVIDIA GPU; JAX runs on {jax.default_backend()!r} here", file=sys.stderr)
        return 2
    seed = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    results = run(seed, kernels_only=args.kernels_only)

    from jpaged.benchmarks import gpu_report

    DOCS.joinpath("performance.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    gpu_report.write(DOCS / "performance.md", results)
    print(gpu_report.section(results))
    return 0 if all(line["error"] <= line["limit"] for line in results["checks"]) else 1


def run(seed: int, *, kernels_only: bool) -> dict[str, Any]:
    """Measure everything; returns it as JSON."""
    import jax

    from jpaged.benchmarks import (
        gpu_correctness,
        gpu_engine,
        gpu_kernels,
        gpu_peers,
        gpu_products,
        gpu_report,
        gpu_states,
    )
    from pallas_kernels.platform import resolve_impl

    results: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "date": gpu_report.today(),
        "command": " ".join(["python", "scripts/gpu_check.py", *sys.argv[1:]]),
        "versions": gpu_report.versions(),
        "seed": seed,
        "checks": [],
    }
    impl = resolve_impl(None)
    print(f"{results['device']}, kernels: {impl}, seed {seed}", flush=True)
    for line in chain(gpu_correctness.checks(seed), gpu_products.checks(seed), gpu_states.checks(seed)):
        verdict = "ok" if line["error"] <= line["limit"] else "WRONG"
        print(f"{verdict:5} {line['check']}: {line['error']:.2g} (at most {line['limit']:.2g})", flush=True)
        results["checks"].append(line)

    sizes = gpu_kernels.Sizes()
    results["copy_bytes_per_second"] = bandwidth = gpu_kernels.copy_bandwidth(sizes)
    results["gemm_flops"] = gpu_kernels.gemm_flops(sizes)
    results["kernels"] = {f"jpaged ({impl})": gpu_kernels.measure(sizes, impl)}
    if impl != "xla":
        results["kernels"]["jpaged (xla)"] = gpu_kernels.measure(sizes, "xla")
    results["kernels"] |= gpu_peers.measure(sizes)
    print(json.dumps(results["kernels"], indent=1), flush=True)
    if not kernels_only:
        load = gpu_engine.Load()
        llm = gpu_engine.random_llm(gpu_engine.llama_8b(), **gpu_engine.settings(load))
        llm.warmup()
        results["engine"] = gpu_engine.measure(llm, load, bandwidth)
    return results


if __name__ == "__main__":
    sys.exit(main())
