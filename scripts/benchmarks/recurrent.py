"""Times the recurrent kernels on this machine: prompts against the reference, decodes against copying memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent import causal_conv, gated_delta, selective_scan, ssd
from pallas_kernels.recurrent.layout import CARRY, NEW, UNIT, StatePlace, Units
from scripts.cases import Rows

PROMPT = 512


@dataclass(frozen=True)
class Layer:
    """A recurrence of a published model: kernel, state of one sequence, and operands for a number of tokens."""

    kernel: Callable
    state: tuple[int, ...]
    operands: Callable


def conv(channels: int) -> Layer:
    def operands(draw, tokens):
        return draw(tokens, channels), draw(channels, 4), draw(channels)

    return Layer(partial(causal_conv, activation="silu"), (channels, 3), operands)


def mamba(channels: int, n: int = 16) -> Layer:
    def operands(draw, tokens):
        x, dt, a = draw(tokens, channels), abs(draw(tokens, channels)), -abs(draw(channels, n))
        return x, dt, a, draw(tokens, n), draw(tokens, n), draw(channels)

    return Layer(selective_scan, (channels, n), operands)


def mamba2(heads: int, groups: int = 1, p: int = 64, n: int = 128) -> Layer:
    def operands(draw, tokens):
        x, dt, a = draw(tokens, heads, p), abs(draw(tokens, heads)), -abs(draw(heads))
        return x, dt, a, draw(tokens, groups, n), draw(tokens, groups, n), draw(heads)

    return Layer(ssd, (heads, p, n), operands)


def delta_net(heads: int, width: int = 128) -> Layer:
    def operands(draw, tokens):
        q, k = (draw(tokens, heads, width) / width**0.5 for _ in range(2))
        return q, k, draw(tokens, heads, width), -abs(draw(tokens, heads)), jax.nn.sigmoid(draw(tokens, heads))

    return Layer(gated_delta, (heads, width, width), operands)


LAYERS = {
    "conv of 1536": conv(1536),
    "conv of 8192": conv(8192),
    "mamba-130m": mamba(1536),
    "jamba-mini": mamba(8192),
    "mamba2-130m": mamba2(24),
    "bamba-9b": mamba2(128),
    "qwen3.5-0.8b": delta_net(16),
    "qwen3-next-80b": delta_net(32),
}


def recurrent(
    layers: list[str] = list(LAYERS),  # noqa: B006 (never changed)
    impls: list[str] = ["xla", "cpu"],  # noqa: B006
    batch: int = 32,
    runs: int = 7,
) -> Rows:
    """Milliseconds of 512 tokens of one sequence, and of a decode of --batch sequences, for each layer and kernel.

    A decode's GB/s count its states read and written, as do those of a copy far larger than the caches. Each time is
    the least of --runs; kernel and reference take turns.
    """
    copied, rows = copy_speed(runs), []
    for name in layers:
        layer = LAYERS[name]
        for impl in impls:
            both = [caller(layer, prompt(), PROMPT, 1, each) for each in (impl, "reference")]
            turns = np.array([[call() for call in both] for _ in range(runs + 1)])[1:]  # the first compiles
            mine, reference = turns.min(axis=0).tolist()
            call = caller(layer, decodes(batch), batch, batch, impl)
            decode = min([call() for _ in range(runs + 1)][1:])
            speed = 2 * 4 * prod(layer.state) * batch / decode / 1e9
            row = {"layer": name, "impl": impl, "512 tokens ms": 1e3 * mine, "reference ms": 1e3 * reference}
            row |= {"times": reference / mine, "decode ms": 1e3 * decode, "state GB/s": speed}
            rows.append(row | {"of a copy": speed / copied})
    return rows


def copy_speed(runs: int) -> float:
    """Return how many GB/s of reading and writing a copy in all threads makes of memory that no cache holds."""
    x = jnp.ones(64 * 2**20, jnp.float32)
    negated = jax.jit(jnp.negative, donate_argnums=0)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        x = jax.block_until_ready(negated(x))
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / min(times) / 1e9


def prompt() -> Units:
    count = PROMPT // UNIT
    numbers = np.arange(count)
    columns = numbers * UNIT, np.full(count, UNIT), np.where(numbers, CARRY, NEW), np.where(numbers < count - 1, -1, 0)
    start, length, read, write = (jnp.asarray(column, jnp.int32) for column in columns)
    return Units(start, length, read, write, jnp.int32(0), jnp.int32(count))


def decodes(batch: int) -> Units:
    row = jnp.arange(batch, dtype=jnp.int32)
    return Units(row, jnp.ones_like(row), row, row, jnp.int32(batch), jnp.int32(batch), 1, True)


def caller(layer: Layer, units: Units, tokens: int, blocks: int, impl: str) -> Callable[[], float]:
    """Return what makes a call that has the pool to itself, and returns its seconds."""
    random = np.random.default_rng(0)
    operands = layer.operands(lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32), tokens)
    place = StatePlace(0, layer.state, jnp.dtype("float32"))
    view = jnp.zeros((blocks, 1, place.rows("float32"), 128), jnp.float32)

    def call(view, operands):
        return layer.kernel(view, 0, place, units, *operands, impl=impl)

    step = jax.jit(call, donate_argnums=0)

    def timed() -> float:
        nonlocal view
        start = time.perf_counter()
        view, _ = jax.block_until_ready(step(view, operands))
        return time.perf_counter() - start

    return timed
