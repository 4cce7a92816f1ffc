"""Times of simulated kernels on a device: turns depend on each other, and one that fails leaves the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.compiled_code import chip_times
from scripts.compiled_code.chip_times import repeated
from scripts.compiled_code.simulated import Launch


def test_a_result_takes_the_place_of_the_first_argument_of_its_shape():
    def add(total, x, y):
        return x + y + total[0, 0], total + x

    total, x, y = jax.jit(lambda *given: repeated(add, 5, *given))(jnp.zeros((2, 2)), jnp.ones(()), jnp.zeros(()))
    # x is 1, 1, 2, 4, 8 in the turns, and total has been added to before.
    np.testing.assert_array_equal(total, np.full((2, 2), 16.0))
    assert (x, y) == (16, 0)


def test_what_depends_on_unchanged_arguments_alone_is_computed_before_the_first_turn():
    @jax.jit
    def plan(keys):
        return jnp.sort(keys)

    def attend(x, keys):
        return jnp.cos(x) + plan(keys)[0]

    text = jax.jit(lambda *given: repeated(attend, 7, *given)).lower(jnp.ones(4), jnp.arange(3.0)).as_text()
    before, _, loop = text.partition("stablehlo.while")
    assert "stablehlo.sort" in before and "stablehlo.sort" not in loop
    assert "stablehlo.cosine" in loop


def test_turns_of_which_none_needs_the_one_before_are_refused():
    with pytest.raises(ValueError, match="no result has the shape and dtype of an argument"):
        repeated(lambda x: x.sum(), 3, jnp.ones(4))


def test_a_launch_that_fails_leaves_the_times_of_the_others(monkeypatch):
    def refuse(target):
        raise ValueError(f"no {target}")

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    launch = Launch(lambda x: x + 1, (shape,), "add", "other", {}, {}, (0,))
    monkeypatch.setattr(chip_times, "LAUNCHES", {"one": refuse, "two": lambda target: launch})
    monkeypatch.setattr(chip_times, "REPEATS", 1)
    found = chip_times.measure("v6e")
    assert found["one"] == "ValueError: no v6e"
    assert isinstance(found["two"], float)
