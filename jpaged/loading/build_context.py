"""Makes a model's `BuildContext`: the properties of its devices that the model must know."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.mesh import alone_on_cpu, platform
from jpaged.model_api import TENSOR_AXIS, BuildContext, Tiles
from pallas_kernels.platform import Impl, resolve_impl

ExactTiles: TypeAlias = Literal["exact", "same bits"]
"""The members of `Tiles` that round nothing."""


def build_context(
    mesh: Mesh,
    dtype: Any,
    *,
    expert_parallel: bool = False,
    stacked: bool | None = None,
    kernel_impl: Impl | None = None,
    computes: bool = True,
    exact_tiles: ExactTiles | None = None,
) -> BuildContext:
    """Return the context that suits a mesh's devices; it has no `rngs`.

    Args:
        mesh: a mesh with the axis `TENSOR_AXIS`.
        stacked: whether layers are stacked for a scan; None = as `layers_are_stacked` says.
        kernel_impl: the kernels to run; None = the best for the current machine. Needed when compiling ahead of time
            for another platform.
        computes: False if the parameters are only written to a checkpoint. A CPU computes with bfloat16 matrices in
            tiles, and with all else in float32; stacks stay plain.
        exact_tiles: selects the matrices stored in bfloat16 that a CPU keeps in bfloat16 although it computes in
            float32, see `BuildContext`; None = none.
    """
    kind, product_impl = platform(mesh), _product_impl(mesh, kernel_impl)
    stacked = layers_are_stacked(kind, kernel_impl) if stacked is None else stacked
    tiles: Tiles | None = None
    if computes and product_impl == "cpu" and not stacked:
        if np.dtype(dtype) == jnp.bfloat16:
            tiles = "rounded"
        elif np.dtype(dtype) == np.float32:
            tiles = exact_tiles
    return BuildContext(
        dtype=np.dtype(np.float32 if tiles else dtype),
        tensor_parallel=mesh.shape[TENSOR_AXIS],
        expert_parallel=expert_parallel,
        stacked=stacked,
        unrolled=kind == "gpu",
        product_impl=product_impl,
        bfloat16_tiles=tiles,
    )


def _product_impl(mesh: Mesh, kernel_impl: Impl | None) -> Impl:
    """Return the implementation of matrix products. The CPU's own are custom calls, which would gather sharded
    operands."""
    impl = resolve_impl(kernel_impl)
    return "xla" if impl == "cpu" and not alone_on_cpu(mesh) else impl


def layers_are_stacked(platform: str, kernels: Impl | None = None) -> bool:
    """Tell whether a model's layers are stacked for a scan: on TPUs, and on GPUs that run XLA's attention.

    CPUs and GPUs copy a layer's weights out of a stack. But unrolled (see `BuildContext`), XLA's attention takes long
    to compile and more memory than those copies; Triton's does not.

    Args:
        platform: ``cpu``, ``tpu``, ``gpu`` or, as ahead of time, ``cuda``.
        kernels: the kernels that will run; None = the best for the current machine.
    """
    return platform == "tpu" or (platform in ("gpu", "cuda") and resolve_impl(kernels) != "gpu")
