"""Runs a loop in a TPU kernel, of which the number of turns may be known to the chip only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def loop(first: Any, stop: Any) -> Callable[[Callable[[Any], None]], None]:
    """Return a decorator that calls ``body(number)`` for the numbers from `first` up to `stop`, without it.

    It is `pl.loop`, but a body comes into the kernel once. jax 0.10 lowers a loop of an unknown number of turns as two,
    the second for what is left of unrolled turns, though it unrolls none: bodies of two such loops within each other
    were lowered four times, which took most of a decode's time to trace and lower.
    """

    def run(body: Callable[[Any], None]) -> None:
        def turn(number):
            body(number)
            return number + 1

        # The condition has `stop` from outside. It is no pair of carried numbers, which would be lowered as above.
        lax.while_loop(lambda number: number < stop, turn, jnp.asarray(first, jnp.int32))

    return run
