"""Writes the sections of docs/serving-sim.md on the simulation itself: its host code's cost and its errors."""

from __future__ import annotations

from typing import Any

from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.own_experiments import MILLION, MODEL, REPEATS


def host(found: dict[str, Any]) -> str:
    """Return the section on the host's time."""
    return f"""## What the host's code costs

{tables.host(found)}

Measured on {found["machine"]}. Processor time of one core, of scheduling a step of decodes and taking its tokens
(median), and of whole simulations of OPT-13B; programs that share the core's caches make it larger. The first table
bounds the real engine too: no device can take steps faster than its host plans them. The engine's default is its last
column, prefix caching with the eviction "predicted"; the simulations of the second table run without. "Coasting" there:
while
all that runs decodes, no sequence ends and nobody can come in, only blocks are asked for, in the scheduler's order, and
the steps are not planned one by one; a test says that it changes no number. Runs of OPT and LLaMA above coast, but
those with beams, with a shared prefix in jpaged's cache, and those that are looked at step by step (what sharing
saves); the Jenga paper's models, whose layers differ, never do. `--only host --million` runs {MILLION:,} requests of
each workload instead of extrapolating.
"""


def calibration(found: dict[str, Any]) -> str:
    """Return the section on the errors against a real engine."""
    attained, sequence, step = found["engine"]
    return f"""## Against a real engine on a CPU

{tables.calibration(found)}

The demo model ({MODEL}, float32) on {found["machine"]}; the best of {REPEATS} runs each, in processor time of all
cores, which other programs on the machine hardly change; bandwidth and FLOP/s are what `jnp.sum` and `jnp.dot` attain
by the same clock. The fit: {attained:.0%} of the roofline, {1e3 * sequence:.2f} ms a sequence, {1e3 * step:.2f} ms a
step. The errors of the runs held out are what to expect of a prediction.
"""
