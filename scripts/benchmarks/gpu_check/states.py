"""Checks a GPU's kernels of recurrent layers and latent attention, each against the reference on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.layout import latent_view_shape
from pallas_kernels.platform import Impl
from pallas_kernels.recurrent import causal_conv, gated_delta, selective_scan, ssd
from pallas_kernels.recurrent.layout import NEW, StatePlace, Units, read_states, write_states

BLOCKS, LAYERS, DECODES, TOKENS = 24, 2, 6, 8
LIMIT, LATENT_LIMIT = 1e-3, 2e-2
"""Errors that are allowed: sums of float32 in another order, and bfloat16's rounding."""

Draw = Callable[..., jax.Array]


def _conv(draw: Draw) -> tuple[Any, ...]:
    return draw(TOKENS, 1056), draw(1056, 4), draw(1056)


def _scan(draw: Draw) -> tuple[Any, ...]:
    steps, rates = abs(draw(TOKENS, 1056)), -abs(draw(1056, 16))
    return draw(TOKENS, 1056), steps, rates, draw(TOKENS, 16), draw(TOKENS, 16), draw(1056)


def _ssd(draw: Draw) -> tuple[Any, ...]:
    steps, rates = abs(draw(TOKENS, 24)), -abs(draw(24))
    return draw(TOKENS, 24, 64), steps, rates, draw(TOKENS, 2, 128), draw(TOKENS, 2, 128), draw(24)


def _delta(draw: Draw) -> tuple[Any, ...]:
    q, k = (draw(TOKENS, 5, 128) / 128**0.5 for _ in range(2))
    return q, k, draw(TOKENS, 5, 128), -abs(draw(TOKENS, 5)), jax.nn.sigmoid(draw(TOKENS, 5))


RECURRENCES: dict[str, tuple[Callable[..., Any], tuple[int, ...], Callable[[Draw], tuple[Any, ...]]]] = {
    "causal_conv": (causal_conv, (1056, 3), _conv),
    "selective_scan": (selective_scan, (1056, 16), _scan),
    "ssd": (ssd, (24, 64, 128), _ssd),
    "gated_delta": (gated_delta, (5, 128, 128), _delta),
}
"""Kernel, shape of a state, and operands."""


def checks(
    seed: int, *, impl: Impl | None = None, context: int = 3000, names: tuple[str, ...] = tuple(RECURRENCES)
) -> Iterator[dict[str, Any]]:
    """Yield lines as `correctness.checks` does; arguments as there, and `names` of the recurrences."""
    random = np.random.default_rng(seed)
    for name in names:
        yield from checks_of_recurrence(random, name, impl=impl)
    yield from checks_of_latents(random, impl=impl, context=context)


def checks_of_recurrence(
    random: np.random.Generator, name: str, *, impl: Impl | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one of `RECURRENCES`."""
    for pool in ("float32", "bfloat16"):
        error = _decode_error(random, name, pool, impl)
        yield {"check": f"{name}, decode, pool of {pool}", "error": error, "limit": LIMIT}


def checks_of_latents(
    random: np.random.Generator, *, impl: Impl | None = None, context: int = 3000
) -> Iterator[dict[str, Any]]:
    """Yield the lines of latent attention."""
    for decode in (True, False):
        kind = "decode" if decode else "mixed"
        error = _latent_error(random, context, decode, impl)
        yield {"check": f"latent_attention, {kind}", "error": error, "limit": LATENT_LIMIT}


def _decode_error(random: np.random.Generator, name: str, pool: str, impl: Impl | None) -> float:
    """Return the largest difference of outputs and states; infinity where another state was written."""
    kernel, shape, operands = RECURRENCES[name]

    def draw(*sizes: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(sizes, np.float32))

    place, ids = StatePlace(32, shape, jnp.dtype("float32")), jnp.arange(BLOCKS)
    view = jnp.zeros((BLOCKS, LAYERS, 32 + place.rows(pool), 128), pool)
    view = write_states(view, 1, place, ids, draw(BLOCKS, *shape))
    blocks = random.permutation(BLOCKS).astype(np.int32)
    read, write = np.full((2, TOKENS), -1, np.int32)
    read[:DECODES] = write[:DECODES] = blocks[:DECODES]
    read[0], read[1], write[2] = NEW, blocks[DECODES], -1
    row = jnp.arange(TOKENS, dtype=jnp.int32)
    arrays = (row, jnp.asarray(read), jnp.asarray(write), jnp.int32(DECODES))
    given = operands(draw)

    def run(which: Impl | None) -> tuple[np.ndarray, np.ndarray]:
        def step(view, arrays, given):
            row, read, write, count = arrays
            units = Units(row, jnp.ones_like(row), read, write, count, count, most=1, decodes_only=True)
            return kernel(view, 1, place, units, *given, impl=which)

        after, out = jax.jit(step)(view, arrays, given)
        return np.asarray(out, np.float64), np.asarray(read_states(after, 1, place, ids), np.float64)

    (want, states), (got, mine) = run("reference"), run(impl)
    kept = np.setdiff1d(np.arange(BLOCKS), write)
    if not np.array_equal(states[kept], mine[kept]):
        return np.inf
    return float(max(np.abs(want - got).max(), np.abs(states - mine).max()))


def _latent_error(random: np.random.Generator, context: int, decode: bool, impl: Impl | None) -> float:
    heads, rank, rotary, size = 16, 512, 64, 16
    lengths = [1, 1, 1, 1] if decode else [1, context // 4, 1, 17]
    kv_lens = np.asarray([context, *(int(random.integers(n, context + 1)) for n in lengths[1:])], np.int32)
    pages = -(-context // size)
    blocks = len(lengths) * pages
    tables = random.permutation(blocks).reshape(len(lengths), pages).astype(np.int32)
    shape = latent_view_shape(blocks, LAYERS, rank + rotary, size)
    view = jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16)
    q = jnp.asarray(random.standard_normal((sum(lengths) + 3, heads, rank + rotary), np.float32), jnp.bfloat16)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    options = {"rank": rank, "scale": (rank + rotary) ** -0.5, "max_query_len": 1 if decode else None}
    want, got = (
        np.asarray(jax.jit(partial(latent_attention, impl=which, **options))(q, view, 1, tables, starts, kv_lens))
        for which in ("reference", impl)
    )
    return float(np.abs(want.astype(np.float64) - got.astype(np.float64)).max())
