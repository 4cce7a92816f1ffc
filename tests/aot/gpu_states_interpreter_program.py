"""Run the Triton kernels of recurrences and of latent attention by Triton's interpreter, and print how far each result
is from NumPy's in float64, as JSON.

Run by `test_aot_gpu_states.py` inside the environment with Triton; one case a line. Arguments are the dtypes of pools
and the latents that are tried; without any all are. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import jax.numpy as jnp
import numpy as np
from latent_cases import CASES as LATENTS
from latent_cases import LAYER as LATENT_LAYER
from latent_cases import SCALE, Case, dense, make_batch
from recurrent_cases import (
    KINDS,
    LAYER,
    Run,
    assert_nothing_else_written,
    cut,
    described,
    expected,
    fresh_view,
    given_operands,
    states_of,
)
from triton_interpreter import interpret

from pallas_kernels.latent_attention import gpu as latents
from pallas_kernels.latent_attention import gpu_takes
from pallas_kernels.paged_attention import gpu_shapes
from pallas_kernels.recurrent import gpu
from pallas_kernels.recurrent.layout import NEW

gpu_shapes.MIN_UNIT = 64  # so that short contexts have several units
gpu_shapes.JOINED = 4
gpu.PROGRAM_NUMBERS = 128  # so that small states take several programs

DECODES = [Run(3, (1,), (3,)), Run(NEW, (1,), (0,)), Run(7, (1,), (-1,)), Run(6, (1,), (5,))]
POOLS = [("float32", "float32"), ("bfloat16", "float32"), ("int8", "float32")]
BATCHES = {"decodes": ([1, 1, 1], [100, 0, 37]), "prompts among them": ([1, 9, 10], [130, 0, 70])}


def decode_error(name: str, pool_dtype: str, state_dtype: str) -> float:
    """Largest difference of outputs and states to NumPy's; what else is written fails."""
    kind, view = KINDS[name], fresh_view(name, pool_dtype, state_dtype)
    operands, constants = given_operands(name)
    if state_dtype != "float32":
        operands = [np.asarray(jnp.asarray(x, state_dtype), np.float64) for x in operands]
    want, states = expected(name, view, DECODES, operands, constants, state_dtype)
    arrays = (
        tuple(jnp.asarray(of, jnp.float32)[: 6 if each is operands else None] for of in each)
        for each in (operands, constants)
    )
    what, decode = described(gpu, name, view, *arrays, state_dtype)
    units = cut(DECODES, [], most=1, decodes_only=True)
    after, out = gpu.run(view, LAYER, units, what, decode, launch=interpret)
    assert_nothing_else_written(name, view, after, states, state_dtype)
    got = {block: states_of(kind, after, [block], state_dtype)[0] for block in states}
    errors = [np.abs(np.asarray(out, np.float64)[: len(want)] - want.reshape(-1, *out.shape[1:])).max()]
    errors += [np.abs(got[block] - states[block]).max() for block in states]
    return float(np.max([*errors, np.abs(np.asarray(out)[len(want) :]).max()]))


def latent_error(case: Case, lengths: list[int], contexts: list[int]) -> float:
    """Largest absolute difference to dense attention in float64."""
    (q, view, *batch), rows = make_batch(case, lengths, contexts, tile=1)
    given = [jnp.asarray(of) for of in (q, view, LATENT_LAYER, *batch)]
    options = {"rank": case.rank, "scale": SCALE, "max_query_len": max(lengths)}
    got = latents.latent_attention(*given, **options, launch=interpret)
    return float(np.abs(np.asarray(got, np.float64) - dense(case, (q, view, *batch), rows)).max())


def main(*chosen: str) -> None:
    def report(name: str, error: float) -> None:
        print(json.dumps({"name": name, "error": None if np.isnan(error) else error}), flush=True)

    for name in KINDS:
        for pool, state in POOLS:
            if not chosen or pool in chosen:
                report(f"{name} in {pool}", decode_error(name, pool, state))
    for dtype in ("bfloat16", "float16"):
        report(f"causal_conv of {dtype}", decode_error("causal_conv", dtype, dtype))
    for name, case in LATENTS.items():
        for batch, (lengths, contexts) in BATCHES.items():
            if gpu_takes(case.width, case.rank) and (not chosen or name in chosen):
                report(f"{name}: {batch}", latent_error(case, lengths, contexts))


if __name__ == "__main__":
    main(*sys.argv[1:])
