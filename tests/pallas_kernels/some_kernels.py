"""Computes with a few kernels of the CPU, in a test's process and in one that has no Numba."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.products import multiply
from pallas_kernels.row_ops import add_rms_norm, gated

CALLS = [
    ("row_ops.cpu_kernel:add_norm_target", ()),
    ("row_ops.cpu_kernel:gate_target", ("silu",)),
    ("matmul.cpu_kernel:matrices_target", ()),
]
"""What `computed` calls, see `pallas_kernels.build_objects.build`."""


def computed() -> list[np.ndarray]:
    """Return what the kernels give, with numbers that a seed gives."""
    draw = np.random.default_rng(0)
    x, more, both = (jnp.asarray(draw.normal(size=(5, width)), jnp.float32) for width in (96, 96, 256))
    weight = jnp.asarray(draw.normal(size=(96, 80)), jnp.float32)
    normed = add_rms_norm(x, more, jnp.ones(96), 1e-6, impl="cpu")
    return [
        np.asarray(array) for array in (*normed, gated(both, "silu", impl="cpu"), multiply(x, [weight], impl="cpu"))
    ]
