"""Chooses the dtype that a model computes in, from the checkpoint's dtype and the dtypes that the devices multiply."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged.config import DTYPES
from jpaged.loading.tensor_reader import StoredAs, TensorReader
from jpaged.validation import one_of

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
