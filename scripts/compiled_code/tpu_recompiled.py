"""Compiles kernels of the calibration again that a package has, and compares their simulated times with its rows."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.calibration import Compared, compared
from scripts.compiled_code.compilers import need_compiler, schedule_dumps
from scripts.compiled_code.scalar_core import run_kernel
from scripts.compiled_code.simulated import Launch, compile_launch, operands_of, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of
from scripts.compiled_code.tpu_schedule import Schedule

GROUPS = {512: 70, 64: 30}
"""Experts with rows, by how many rows there are: as many as the bytes of the calibration's rows are."""


LATENCIES, EFFICIENCIES = (0.6e-6, 0.8e-6, 1.0e-6, 1.2e-6, 1.4e-6), (0.84, 0.86, 0.88, 0.90, 0.92)
"""Constants of DMAs that ``--fit`` tries."""


def recompiled(folder: Path, fit: bool = False) -> Iterator[Row]:
    """Simulated times of tpu-inference's `gmm_v2`, next to those of the calibration and the published ones.

    FOLDER has the unpacked wheel:

        pip download --no-deps tpu-inference==0.25.0 && unzip tpu_inference-*.whl -d FOLDER

    The published rows name no sizes of groups: here all experts have equally many rows. With `fit`, a last row has the
    latency and the efficiency of DMAs with which these times are nearest to the published ones, and by how much.
    """
    need_compiler("tpu")
    stub_package(folder)
    kernels = []
    with schedule_dumps() as dumps:
        for known in (row for row in compared() if row.kind == "experts"):
            launch = _gmm_v2(known.chip, *known.kernel.removeprefix("gmm2-").split("-"))
            (schedule,), _ = compile_launch(launch, dumps)
            found = row_of(simulate(launch, [schedule], known.chip), "experts", known.chip)
            row: Row = {"kernel": known.kernel, "measured us": known.measured, "calibration us": known.simulated}
            yield row | found | {"of the calibration's": found["us"] / known.simulated}
            kernels.append((known, schedule, operands_of(launch)[0]))
    if fit:
        tried = [_errors(kernels, *pair) for pair in product(LATENCIES, EFFICIENCIES)]
        yield min(tried, key=lambda row: row["error"]) | {"kernel": "fitted DMAs"}


def _errors(kernels: list[tuple[Compared, Schedule, dict[int, np.ndarray]]], latency: float, efficiency: float) -> Row:
    """Return the root of the mean squared error of the kernels' times with some constants of DMAs."""
    squares = []
    for known, schedule, operands in kernels:
        chip = CHIPS[known.chip]._replace(latency=latency, efficiency=efficiency)
        simulated = run_kernel(schedule, operands, chip).cycles / chip.clock * 1e6
        squares.append((simulated / known.measured - 1) ** 2)
    return {"latency, us": latency * 1e6, "efficiency": efficiency, "error": (sum(squares) / len(squares)) ** 0.5}


def stub_package(folder: Path) -> None:
    """Let modules of an unpacked tpu-inference be imported without its own ``__init__``, which imports the server."""
    package = types.ModuleType("tpu_inference")
    package.__path__ = [str(folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    logger = types.ModuleType("tpu_inference.logger")  # its own is vLLM's
    logger.init_logger = _init_logger  # type: ignore[attr-defined]
    sys.modules["tpu_inference.logger"] = logger
    for name in ("tpu_inference.utils", "sympy"):  # the one imports torch; of the other a function is needed
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["sympy"].divisors = lambda n: [i for i in range(1, n + 1) if n % i == 0]  # type: ignore[attr-defined]
    sys.modules["tpu_inference.utils"].get_device_name = lambda: ""  # type: ignore[attr-defined]
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    if not hasattr(tpu, "reciprocal"):  # a later jax has it there
        tpu.reciprocal = pallas.reciprocal


def _init_logger(name: str) -> logging.Logger:
    found: Any = logging.getLogger(name)
    found.warning_once, found.info_once = found.warning, found.info
    return found


def _gmm_v2(target: str, rows: str, inputs: str, outputs: str, dtype: str) -> Launch:
    import jax.numpy as jnp
    from tpu_inference.kernels.megablox.gmm_v2 import gmm_v2  # type: ignore[import-not-found]

    array, _ = arrays_of(CHIPS[target])
    groups = GROUPS[int(rows)]
    sizes = np.full(groups, int(rows) // groups, np.int32)
    sizes[: int(rows) % groups] += 1
    arguments = (
        array((int(rows), int(inputs)), jnp.bfloat16),
        array((groups, int(inputs), int(outputs)), jnp.bfloat16 if dtype == "bf16" else jnp.float8_e4m3fn),
        array((groups,)),
    )

    def run(x, matrices, sizes):
        return gmm_v2(x, matrices, sizes)

    return Launch(run, arguments, "gmm_v2.*", "experts", {2: sizes}, {})
