"""Run a TPU kernel under the interpreter that simulates DMAs and semaphores and records races."""

from __future__ import annotations

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

CLOCKS = 64
"""DMAs share the entries of a vector clock; too few, and unordered DMAs look ordered."""


def run_recording_races(kernel, *args, **kwargs):
    """(result, whether two accesses to one place were unordered) of ``kernel(*args, interpret=..., **kwargs)``.

    From jax 0.12 on a race ends the run, and there is no result.
    """
    simulator.reset_tpu_interpret_mode_state()
    interpret = pltpu.InterpretParams(detect_races=True, vector_clock_size=CLOCKS)
    try:
        result = jax.block_until_ready(jax.jit(lambda *a: kernel(*a, **kwargs, interpret=interpret))(*args))
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return None, True
    assert simulator.races is not None, "the kernel was not run by the simulator"
    return result, simulator.races.races_found
