"""Run a TPU kernel under the interpreter that simulates DMAs and semaphores and records races."""

from __future__ import annotations

from itertools import count
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax.experimental.pallas import tpu as pltpu

CLOCKS = 64
"""The entries of a vector clock. Two unordered DMAs that share one look ordered."""


def clocks_in_turn():
    """Give DMAs the entries of the clock in turn, so that as many in a row as it has share none.

    The simulator draws them, and of two DMAs that race one in 63 would go unseen.
    """
    drawn = count()

    def next_clock(memory):
        return memory.num_cores + next(drawn) % (memory.vector_clock_size - memory.num_cores)

    return mock.patch.object(SharedMemory, "get_random_virtual_device_id", next_clock)


def run_recording_races(kernel, *args, **kwargs):
    """(result, whether two accesses to one place were unordered) of ``kernel(*args, interpret=..., **kwargs)``.

    From jax 0.12 on a race ends the run, and there is no result.
    """
    simulator.reset_tpu_interpret_mode_state()
    interpret = pltpu.InterpretParams(detect_races=True, vector_clock_size=CLOCKS)
    try:
        with clocks_in_turn():
            result = jax.block_until_ready(jax.jit(lambda *a: kernel(*a, **kwargs, interpret=interpret))(*args))
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return None, True
    assert simulator.races is not None, "the kernel was not run by the simulator"
    return result, simulator.races.races_found
