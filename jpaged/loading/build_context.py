"""Fits a model to its devices: chooses the dtype that it computes in, and makes its `BuildContext`."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.config import DTYPES
from jpaged.execution.mesh import alone_on_cpu, platform
from jpaged.loading.tensor_reader import StoredAs, TensorReader
from jpaged.model_api import TENSOR_AXIS, Bfloat16Tiles, BuildContext
from jpaged.validation import one_of
from pallas_kernels.layout import LANES
from pallas_kernels.platform import Impl, resolve_impl

CompactTiles: TypeAlias = Literal[Bfloat16Tiles.FLOAT32_PRODUCT, Bfloat16Tiles.FLOAT32_BITS]
"""The members of `Bfloat16Tiles` that round nothing."""


def build_context(
    mesh: Mesh,
    dtype: Any,
    *,
    expert_parallel: bool = False,
    stacked: bool | None = None,
    kernel_impl: Impl | None = None,
    computes: bool = True,
    compact_tiles: CompactTiles | None = None,
    longest: int | None = None,
) -> BuildContext:
    """Return the context that suits a mesh's devices; it has no `rngs`.

    Args:
        mesh: a mesh with the axis `TENSOR_AXIS`.
        stacked: whether layers are stacked for a scan; None = as `layers_are_stacked` says.
        kernel_impl: the kernels to run; None = the best for the current machine. Needed when compiling ahead of time
            for another platform.
        computes: False if the parameters are only written to a checkpoint. A CPU computes with bfloat16 matrices in
            tiles, and with all else in float32; stacks stay plain.
        compact_tiles: selects the matrices stored in bfloat16 that a CPU keeps in bfloat16 although it computes in
            float32; None = none.
        longest: see `BuildContext`.
    """
    kind, product_impl = platform(mesh), _product_impl(mesh, kernel_impl)
    stacked = layers_are_stacked(kind, kernel_impl) if stacked is None else stacked
    tiles: Bfloat16Tiles | None = None
    if computes and product_impl == "cpu" and not stacked:
        if np.dtype(dtype) == jnp.bfloat16:
            tiles = Bfloat16Tiles.BFLOAT16_PRODUCT
        elif np.dtype(dtype) == np.float32:
            tiles = compact_tiles
    return BuildContext(
        dtype=np.dtype(np.float32 if tiles else dtype),
        tensor_parallel=mesh.shape[TENSOR_AXIS],
        expert_parallel=expert_parallel,
        stacked=stacked,
        unrolled=kind == "gpu",
        product_impl=product_impl,
        # Of all models on TPUs alike, whatever multiplies: training is given the arrays that are served.
        column_unit=LANES if kind == "tpu" or product_impl in ("tpu", "tpu_interpret") else 1,
        bfloat16_tiles=tiles,
        longest=longest,
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


FIRST_WITH_BFLOAT16 = 8.0
"""Compute capability of the first NVIDIA GPUs whose matrix units take bfloat16."""
_GPUS = ("gpu", "cuda", "rocm")
_LARGEST = 65504
"""The largest float16."""

_log = logging.getLogger(__name__)


def capability_of(device: Any) -> float | None:
    """Return the compute capability of a JAX device, such as 7.5; None where it is no NVIDIA GPU."""
    try:
        return float(device.compute_capability)
    except (AttributeError, TypeError, ValueError):
        return None


def check_dtype(dtype: str, platform: str, capability: float | None = None) -> None:
    """Check that a dtype is known and that the platform's devices compute in it.

    Args:
        dtype: one of `EngineConfig`'s plain names.
        platform: ``cpu``, ``tpu``, ``gpu`` or, as ahead of time, ``cuda``.
        capability: the compute capability of an NVIDIA GPU, where it is known.

    Raises:
        ValueError: `dtype` is unknown, float16 elsewhere than on a GPU, or bfloat16 on a GPU that has none.
    """
    one_of("dtype", dtype, DTYPES)
    if dtype == "float16" and platform not in _GPUS:
        raise ValueError(
            f"dtype='float16' needs a GPU: a {platform} has no fast float16; dtype='auto' takes what it is good at"
        )
    if dtype == "bfloat16" and _is_old(capability):
        raise ValueError(
            f"dtype='bfloat16' needs a GPU of compute capability {FIRST_WITH_BFLOAT16} or more, and this one has "
            f"{capability}: XLA would make a float32 copy of each matrix at each use; use dtype='float16'"
        )


def chosen_dtype(stored: TensorReader | StoredAs, platform: str, capability: float | None = None) -> str:
    """Return the dtype that "auto" stands for; log if it is narrower than the checkpoint's.

    CPUs compute in float32. Elsewhere float32 stays float32, and on GPUs float16 stays float16; all else, including
    quantised checkpoints, becomes bfloat16, or float16 on GPUs that have no bfloat16. TPUs have no float16.
    """
    if platform == "cpu":
        return "float32"
    if stored.stored_dtype.itemsize >= 4 and not stored.quantised:
        return "float32"
    half = stored.stored_dtype == np.float16 and not stored.quantised
    if platform not in _GPUS:
        if half:
            _log.info(
                "dtype: bfloat16, as a %s has no fast float16, which the checkpoint holds; it has 3 bits less, and "
                "dtype='float32' keeps all",
                platform,
            )
        return "bfloat16"
    if _is_old(capability):
        if stored.stored_dtype == jnp.bfloat16:
            _log.warning(
                "dtype: float16, as compute capability %s has no bfloat16, which the checkpoint holds; numbers beyond "
                "%d overflow, and dtype='float32' has room for them",
                capability,
                _LARGEST,
            )
        return "float16"
    return "float16" if half else "bfloat16"


def _is_old(capability: float | None) -> bool:
    return capability is not None and capability < FIRST_WITH_BFLOAT16
