"""Triton's float8 by integer operations, on every number that could go wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton_interpreter import interpret

from pallas_kernels.gpu_codes import float8_bits, float8_values
from pallas_kernels.gpu_launch import Launch
from pallas_kernels.kv_codes import stored


@triton.jit
def unpack(bits, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, float8_values(tl.load(bits + i)))


@triton.jit
def pack(values, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, float8_bits(tl.load(values + i)))


def _run(kernel: triton.JITFunction, array: jax.Array, dtype: str) -> np.ndarray:
    out = jax.ShapeDtypeStruct(array.shape, dtype)
    (got,) = interpret(Launch(kernel, (1,), (out,), {"N": len(array)}, num_warps=4), array)
    return np.asarray(got)


def wrong_values() -> float:
    """Codes of the 254 that are no NaN which are read as another number."""
    codes = jnp.arange(256, dtype=jnp.uint8)
    want = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32))
    return float(np.sum((_run(unpack, codes, "float32") != want) & np.isfinite(want)))


def wrong_codes() -> float:
    """Numbers packed into other bits than JAX's: what codes stand for, midpoints, the neighbours of both, extremes."""
    finite = np.sort(np.asarray(jnp.arange(256, dtype=jnp.uint8).view(jnp.float8_e4m3fn).astype(jnp.float32)))[:254]
    exact = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [460, 464, 468, 0, -0.0, 1e-30, 1e-42, 1e38]])
    exact = exact.astype(np.float32)
    near = [np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([exact, -exact, *near, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    values = jnp.asarray(np.pad(values, (0, 4096 - len(values))))
    return float(np.sum(_run(pack, values, "uint8") != np.asarray(stored(values, jnp.uint8))))
