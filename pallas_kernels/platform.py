"""Picks which implementation of a kernel runs: the one place that looks at the platform."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import jax

from pallas_kernels import cpu_objects

Impl: TypeAlias = Literal["reference", "xla", "cpu", "tpu", "tpu_interpret", "gpu"]
"""``reference``: short jnp, obviously right. ``xla``: fast jnp for any backend. ``cpu``: attention over any KV,
products and recurrences in float32 by loops compiled ahead or by Numba, the rest as ``xla``. ``tpu``: Pallas for TPUs.
``tpu_interpret``: the TPU kernel run by Pallas' interpreter on any backend. ``gpu``: Triton, through jax-triton."""

GPU_SWITCH = "PALLAS_KERNELS_GPU"
"""Environment variable that chooses a GPU's kernels: ``xla``, the default, or ``triton``. The Triton kernels have been
compiled and interpreted, but no GPU has run them, and a wrong one would give wrong tokens without a word."""
MIN_COMPUTE_CAPABILITY = 7.5
"""Triton compiles for older GPUs no more. Which numbers a GPU multiplies `gpu_launch.multiplies` tells."""

_log = logging.getLogger(__name__)


def resolve_impl(impl: Impl | None) -> Impl:
    """Return the implementation to run; None asks for the best one of the default backend.

    Pass it explicitly when compiling ahead of time: the default backend is then not the target.

    Raises:
        ValueError: when `impl` is not one of `Impl`.
    """
    if impl is None:
        backend = jax.default_backend()
        own: dict[str, Callable[[], Impl]] = {"cpu": _impl_of_cpu, "gpu": _impl_of_gpu, "tpu": lambda: "tpu"}
        return own[backend]() if backend in own else "xla"
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {get_args(Impl)}")
    return impl


def target_platform() -> str:
    """Return the platform of the target devices: those of the mesh in use, else the default backend's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@cache
def _impl_of_cpu() -> Impl:
    """Return ``cpu`` where there are loops, see `has_cpu_loops`, else ``xla``; logs which once a process."""
    if has_cpu_loops():
        return "cpu"
    _log.warning("kernels of the CPU: XLA, about half as fast in decoding, as numba is not installed")
    return "xla"


def has_cpu_loops() -> bool:
    """Tell whether ``cpu`` runs here: its loops were compiled ahead for this processor, or Numba compiles them."""
    return cpu_objects.loaded() is not None or find_spec("numba") is not None


@cache
def _impl_of_gpu() -> Impl:
    """Return ``gpu`` where the Triton kernels run, else ``xla``; logs which and why, once a process."""
    device = jax.devices()[0]
    why_not = why_no_triton(str(getattr(device, "compute_capability", "")))
    if why_not:
        _log.warning("kernels of %s: XLA, %s", device.device_kind, why_not)
        return "xla"
    _log.info("kernels of %s: Triton, through jax-triton", device.device_kind)
    return "gpu"


def gpu_choice() -> str:
    """Return ``xla`` or ``triton``, as `GPU_SWITCH` says.

    Raises:
        ValueError: it says something else.
    """
    chosen = os.environ.get(GPU_SWITCH) or "xla"
    if chosen not in ("xla", "triton"):
        raise ValueError(f"{GPU_SWITCH}={chosen!r} is not 'xla' or 'triton'")
    return chosen


def why_no_triton(compute_capability: str) -> str | None:
    """Return why a GPU does not run the Triton kernels, or None if it does.

    Args:
        compute_capability: e.g. ``9.0``, as JAX tells it.

    Raises:
        ValueError: `GPU_SWITCH` is set to something else than ``xla`` and ``triton``.
    """
    chosen = gpu_choice()
    try:
        capability = float(compute_capability)
    except ValueError:
        return f"as compute capability {compute_capability!r} is not an NVIDIA GPU's"
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"as compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}"
    if chosen == "xla":
        return f"as no GPU has run the Triton kernels yet: {GPU_SWITCH}=triton takes them"
    try:
        import_module("jax_triton")
    except Exception as error:  # one of another JAX's version may fail in any way
        return f"as jax-triton cannot be imported ({error})"
    return None
