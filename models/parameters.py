"""Makes parameters before a checkpoint is loaded: random matrices, and vectors of one value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.model_api import BuildContext

INIT_STDDEV = 0.02
"""Standard deviation of random weights, used where no checkpoint is loaded (tests, benchmarks of published shapes)."""


def random_param(build: BuildContext, shape: tuple[int, ...], *, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
    """Return a normally distributed parameter with standard deviation `INIT_STDDEV`.

    Raises:
        ValueError: the context has no `rngs`.
    """
    if build.rngs is None:
        raise ValueError(f"BuildContext.rngs=None, but a parameter of shape {shape} is drawn: give it nnx.Rngs(seed)")
    if build.shapes_only:
        return kind(jnp.zeros(shape, build.dtype))
    drawn = jax.random.normal(build.rngs.params(), shape, build.dtype)
    return kind(drawn * jnp.asarray(INIT_STDDEV, build.dtype))


class LayerVector(nnx.Param):
    """A vector that stands as a `StackedRow` in a loop over stacked layers, where kernels read those."""


class LayerTable(nnx.Param):
    """Matrices or biases of a layer's experts that stand as a `StackedTable` where vectors stand as a `StackedRow`."""


def constant_param(
    build: BuildContext, shape: tuple[int, ...], value: float = 0.0, *, kind: type[nnx.Param] = nnx.Param
) -> nnx.Param:
    """Return a parameter whose entries all are `value`: a bias, or a norm's scale."""
    return kind(jnp.full(shape, value, build.dtype))


def wide_param(shape: tuple[int, ...], value: float = 0.0) -> nnx.Param:
    """Return a float32 parameter filled with `value`, for any dtype of the context: recurrences repeat it at every
    token."""
    return nnx.Param(jnp.full(shape, value, jnp.float32))
