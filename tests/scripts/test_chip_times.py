"""Times of simulated kernels on a device: turns depend on each other, and one that fails leaves the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from scripts.compiled_code import chip_times
from scripts.compiled_code.simulated import Launch


def test_a_turn_takes_what_the_turn_before_left_in_a_donated_argument():
    def add(total, x):
        return x * 0, total + x

    total, x = jax.jit(lambda *given: chip_times.repeated(add, (0,), 5, *given))(jnp.zeros((2, 2)), jnp.ones(()))
    np.testing.assert_array_equal(total, np.full((2, 2), 5.0))
    assert x == 1


def test_all_turns_run_though_none_changes_an_argument():
    run = jax.jit(lambda x: chip_times.repeated(lambda x: jnp.sin(x), (), 7, x))
    body = run.lower(jnp.ones(4)).as_text()
    assert "optimization_barrier" in body and "while" in body


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
