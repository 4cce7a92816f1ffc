"""Describes a Triton launch in one way, and launches it on a GPU.

A kernel module builds a `Launch` and hands it with its arrays to a *launcher*. `triton_call` is the launcher of
compiled programs; tests use others, which compile the same launch for a GPU that is not there, or interpret it.

XLA can record operations that follow one another into a command buffer (a CUDA graph) and launch them at once, but only
calls whose handler declares that it may be recorded (XLA's ``command_buffer_conversion_pass``). jaxlib has two handlers
of Triton launches: the older one, ``triton_kernel_call``, to which jax-triton 0.3 lowers, does not;
``triton_kernel_call_ffi`` does. Both take the same description of a launch. Newer versions of jax-triton lower to the
second themselves; `target_of_calls` says when the older ones shall.

Triton and jax-triton are imported only where they are used, as neither is installed with JAX for CPUs or TPUs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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


@dataclass(frozen=True)
class Launch:
    """Describes a Triton kernel's launch, with everything but its arrays.

    Attributes:
        kernel: a ``triton.jit`` function. Its parameters are the inputs' pointers, or whole numbers as they are, one
            pointer that it leaves alone for every aliased output, the other outputs' pointers, then the constants. A
            kernel is compiled once for all numbers but 1, and again for each constant: a batch's sizes are numbers.
        grid: programs along each axis.
        out: the outputs; aliased ones come first.
        constants: the kernel's ``tl.constexpr`` parameters.
        aliases: input index to output index of arrays that are updated in place, through the input's pointer; no
            number stands before them.
        num_warps, num_stages: see `triton.Config`.
    """

    kernel: Any
    grid: tuple[int, ...]
    out: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    aliases: Mapping[int, int] = field(default_factory=dict)


Launcher: TypeAlias = Callable[..., list[jax.Array]]
"""``launcher(launch, *inputs) -> outputs``."""

_capability: ContextVar[int | None] = ContextVar("compute_capability", default=None)
_chip: ContextVar[str] = ContextVar("chip", default="")


@contextmanager
def compiling_for(compute_capability: int, chip: str = "") -> Iterator[None]:
    """Trace and lower for another GPU than this machine's: compiling ahead of time.

    Args:
        compute_capability: e.g. 90 for sm_90.
        chip: what JAX calls the GPU there, e.g. ``NVIDIA H200``; "" = any.
    """
    tokens = _capability.set(compute_capability), _chip.set(chip)
    try:
        yield
    finally:
        _capability.reset(tokens[0])
        _chip.reset(tokens[1])


def chip_name() -> str:
    """Return JAX's name of the GPU compiled for; "" if none was named."""
    return jax.devices()[0].device_kind if _capability.get() is None else _chip.get()


def compute_capability() -> int:
    """Return that of the GPU that is compiled for, e.g. 90 for sm_90; 0 where none is."""
    asked = _capability.get()
    own = float(getattr(jax.devices()[0], "compute_capability", 0)) if asked is None else asked / 10
    return round(10 * own)


def has_float8() -> bool:
    """Tell whether the GPU that is compiled for converts float8_e4m3fn by an instruction: from sm_89 on."""
    return compute_capability() >= 89


def has_matrix_units() -> bool:
    """Tell whether Triton multiplies by matrix units on the GPU that is compiled for: from sm_80 on.

    On sm_75 Triton 3.9 multiplies numbers one by one, as float32.
    """
    return not 0 < compute_capability() < 80


def multiplies(*dtypes: DTypeLike) -> bool:
    """Tell whether Triton kernels multiply all of these dtypes on the GPU that is compiled for.

    From sm_80 on they do; on sm_75 float16, to which codes of one byte are converted.
    """
    halves = (jnp.dtype(dtype) == jnp.float16 or jnp.dtype(dtype).itemsize == 1 for dtype in dtypes)
    return has_matrix_units() or all(halves)


def reaches(rows: int, *widths: int) -> bool:
    """Tell whether offsets of 32 bits, with which products of experts find their rows, reach all numbers of matrices of
    so many rows."""
    return rows * max(widths) < 1 << 31


def triton_call(launch: Launch, *inputs: jax.Array | int) -> list[jax.Array]:
    """Launch on the GPU that runs the surrounding program."""
    import jax_triton

    call = jax_triton.triton_call
    # From 0.4 on, an aliased output has no separate pointer: the parameter kept for it gets a constant.
    newer = "out_type" in inspect.signature(call).parameters
    outputs = {"out_type" if newer else "out_shape": list(launch.out)}
    target = None if newer else target_of_calls()
    recorded = {} if target is None else {"custom_call_target_name": target}
    return call(
        *inputs,
        *((1,) * len(launch.aliases) if newer else ()),
        kernel=launch.kernel,
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        input_output_aliases=dict(launch.aliases),
        compute_capability=_capability.get(),
        **outputs,
        **recorded,
        **launch.constants,
    )


def like(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
