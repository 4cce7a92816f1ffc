"""Lowers Triton launches to calls that XLA takes into its command buffers (CUDA graphs).

XLA records operations that follow one another and launches them at once, but only calls whose handler declares that it
may be recorded (XLA's ``command_buffer_conversion_pass``). jaxlib has two handlers of Triton launches: the older one,
``triton_kernel_call``, to which jax-triton 0.3 lowers, does not; ``triton_kernel_call_ffi`` does. Both take the same
description of a launch. Newer versions of jax-triton lower to the second themselves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax

TARGET = "triton_kernel_call_ffi"
FIRST_JAXLIB = (0, 10, 3)
"""Pallas of jax 0.10.2 lowers its own Triton kernels to this handler with a newer jaxlib than 0.10.2 only."""

VARIABLE = "PALLAS_KERNELS_RECORD_LAUNCHES"
"""Environment variable that says it whatever jaxlib's version is: 1 = recorded calls, 0 = jax-triton's own."""


def target_of_calls() -> str | None:
    """Return the target that jax-triton shall call, None for its own: that of recorded calls from `FIRST_JAXLIB` on.

    jaxlib 0.10.2 has the handler too, but it is untested there.

    Raises:
        ValueError: `VARIABLE` is neither 0 nor 1.
        RuntimeError: it asks for recorded calls, and jaxlib has no handler for them.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={asked!r} is neither 0 nor 1")
    if asked == "1" and not _has_handler():
        raise RuntimeError(f"{VARIABLE}=1: this jaxlib has no handler {TARGET!r}")
    if not (asked == "1" or (not asked and _jaxlib_version() >= FIRST_JAXLIB and _has_handler())):
        return None
    _register()
    return TARGET


def _jaxlib_version() -> tuple[int, ...]:
    import jaxlib

    return tuple(int(part) for part in jaxlib.__version__.split(".")[:3])


@cache
def _has_handler() -> bool:
    from jaxlib import gpu_triton

    module = getattr(gpu_triton, "_cuda_triton", None)
    return module is not None and TARGET in module.registrations()


@cache
def _register() -> None:
    """Lower jax-triton's primitive by `_lower`, which handles calls whose target is `TARGET` and leaves others as
    before."""
    from jax.interpreters import mlir
    from jax_triton import triton_lib

    before = partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)
    mlir.register_lowering(triton_lib.triton_kernel_call_p, partial(_lower, before), platform="cuda")


def _lower(before: Any, ctx: Any, *arrays: Any, **parameters: Any) -> Sequence[Any]:
    """Lower a launch: the call that jax-triton makes is replaced by one of the newer interface."""
    from jax._src.lib.mlir import ir

    results = before(ctx, *arrays, **parameters)
    if parameters["custom_call_target_name"] != TARGET:
        return results
    call = results[0].owner
    described = ir.StringAttr(call.attributes["backend_config"]).value_bytes
    call.erase()
    aliases = dict(parameters["input_output_aliases"])
    lower = jax.ffi.ffi_lowering(TARGET, api_version=4, operand_output_aliases=aliases)
    return lower(ctx, *arrays, opaque=described)
