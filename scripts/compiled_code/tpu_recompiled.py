"""Compiles kernels of the calibration again that a package has, and compares their simulated times with its rows."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.calibration import compared
from scripts.compiled_code.compilers import need_compiler, schedule_dumps
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of

GROUPS = {512: 70, 64: 30}
"""Experts with rows, by how many rows there are: as many as the bytes of the calibration's rows are."""


def recompiled(folder: Path) -> Iterator[Row]:
    """Simulated times of tpu-inference's `gmm_v2`, next to those of the calibration and the published ones.

    FOLDER has the unpacked wheel:

        pip download --no-deps tpu-inference==0.25.0 && unzip tpu_inference-*.whl -d FOLDER

    The published rows name no sizes of groups: here all experts have equally many rows.
    """
    need_compiler("tpu")
    stub_package(folder)
    with schedule_dumps() as dumps:
        for known in compared():
            if known.kind == "experts":
                launch = _gmm_v2(known.chip, *known.kernel.removeprefix("gmm2-").split("-"))
                found = row_of(simulate(launch, compile_launch(launch, dumps)[0], known.chip), "experts", known.chip)
                row: Row = {"kernel": known.kernel, "measured us": known.measured, "calibration us": known.simulated}
                yield row | found | {"of the calibration's": found["us"] / known.simulated}


def stub_package(folder: Path) -> None:
    """Let modules of an unpacked tpu-inference be imported without its own ``__init__``, which imports the server."""
    package = types.ModuleType("tpu_inference")
    package.__path__ = [str(folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package


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
