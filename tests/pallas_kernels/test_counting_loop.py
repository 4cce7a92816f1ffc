"""A loop of an unknown number of turns: its numbers, and that Mosaic is given a form that it lowers once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.counting_loop import loop


def note_turns(bounds, out):
    out[...] = jnp.zeros_like(out)

    @loop(bounds[0], bounds[1])
    def _(number):
        out[number] = out[number] + number


@pytest.mark.parametrize("first, stop", [(0, 8), (3, 5), (4, 4), (5, 2)])
def test_the_body_runs_once_for_each_number(first, stop):
    notes = pl.pallas_call(
        note_turns,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.int32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
        interpret=True,
    )(jnp.array([first, stop], jnp.int32))
    assert np.asarray(notes).tolist() == [number if first <= number < stop else 0 for number in range(8)]


def test_only_the_number_is_carried_as_what_also_carries_its_end_is_lowered_twice():
    def turns(stop):
        loop(0, stop)(lambda number: None)
        return stop

    (turn,) = jax.make_jaxpr(turns)(3).eqns
    assert turn.primitive.name == "while"
    assert len(turn.outvars) == 1
