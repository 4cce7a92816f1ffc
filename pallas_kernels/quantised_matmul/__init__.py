"""Multiplies rows with a `QuantisedMatrix`, with the matrices of experts, or with the vocabulary's table.

Each function calls the function of the same name in the platform's module; platforms without a module use `reference`.
Operands may be a shard's own arrays, inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul import chosen_product
from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.quantised import QuantisedMatrix

__all__ = ["quantised_matmul", "quantised_matmul_grouped", "quantised_matmul_table"]

_MODULES: dict[Impl, str] = {name: f"{__name__}.{name}" for name in ("reference", "cpu", "tpu", "gpu")}
"""The module of each `Impl`, imported at its first use, as Triton's packages may be missing."""


def quantised_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[QuantisedMatrix],
    index: int | Int[Array, ""] = 0,
    *,
    out_dtype: jnp.dtype | None = None,
    input_shards: int = 1,
    impl: Impl | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]``; only that matrix is read.

    Args:
        matrices: [inputs, outputs] each, with axis -2.
        index: may be traced.
        out_dtype: the result's dtype; None = that of `x`.
        input_shards: shards over which XLA has split the contracted axis. Only the TPU version uses it, to sum over
            shards once.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform. ``gpu`` needs unsharded operands.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    run = _module(impl).quantised_matmul
    if resolve_impl(impl) == "tpu":
        run = partial(run, input_shards=input_shards)
    return chosen_product(lambda x, matrix: run(x, matrix, dtype), x, matrices, index)


def quantised_matmul_table(
    x: Float[Array, "rows embed"], table: QuantisedMatrix, *, impl: Impl | None = None
) -> Float[Array, "rows vocab"]:
    """Return ``x @ table.T`` in float32; `table` is [vocab, embed], with axis -1. See `quantised_matmul`."""
    return _module(impl).quantised_matmul_table(x, table)


def quantised_matmul_grouped(
    x: Float[Array, "rows inputs"],
    table: QuantisedMatrix,
    counts: Int[Array, " experts"],
    *,
    impl: Impl | None = None,
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix, in the dtype of `x`; rows of no expert give 0.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        table: [experts, inputs, outputs], with axis -2.
        impl: see `quantised_matmul`; ``cpu`` needs unsharded operands.
    """
    return _module(impl).quantised_matmul_grouped(x, table, counts)


def _module(impl: Impl | None) -> Any:
    return import_module(_MODULES.get(resolve_impl(impl), _MODULES["reference"]))
