"""Simulates the TPU's decode kernels of recurrent layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of

LAYERS, SEQS = 4, 64
POOL_BYTES = 2**28
"""Bytes of the pool: more than VMEM has, into which the compiler would otherwise move it."""


class Layer(NamedTuple):
    """Describes a recurrence on one device: kernel, shape of a state, its dtype, and its operands' shapes."""

    kernel: str
    state: tuple[int, ...]
    operands: Callable[[int], tuple[tuple[int, ...], ...]]
    dtype: str = "float32"


def conv(channels: int, width: int = 4) -> Layer:
    def shapes(tokens):
        return (tokens, channels), (channels, width), (channels,)

    return Layer("causal_conv", (channels, width - 1), shapes, "bfloat16")


def scan(channels: int, n: int = 16) -> Layer:
    def shapes(tokens):
        return (tokens, channels), (tokens, channels), (channels, n), (tokens, n), (tokens, n), (channels,)

    return Layer("selective_scan", (channels, n), shapes)


def ssd(heads: int, p: int = 64, n: int = 128, groups: int = 1) -> Layer:
    def shapes(tokens):
        of_groups = (tokens, groups, n)
        return (tokens, heads, p), (tokens, heads), (heads,), of_groups, of_groups, (heads,)

    return Layer("ssd", (heads, p, n), shapes)


def delta(heads: int, k: int = 128, v: int = 128) -> Layer:
    def shapes(tokens):
        return (tokens, heads, k), (tokens, heads, k), (tokens, heads, v), (tokens, heads), (tokens, heads)

    return Layer("gated_delta", (heads, k, v), shapes)


SHAPES = {
    "jamba-mini conv": conv(8192),
    "jamba-mini scan": scan(8192),
    "jamba-mini x8 scan": scan(1024),
    "bamba-9b ssd": ssd(128),
    "bamba-9b x8 ssd": ssd(16),
    "codestral-mamba ssd": ssd(128, groups=8),
    "qwen3-next conv": conv(8192),
    "qwen3-next delta": delta(32),
    "qwen3-next x8 delta": delta(4),
}


def recurrent(
    targets: list[str] = list(CHIPS),  # noqa: B006 (never changed)
    layers: list[str] = list(SHAPES),  # noqa: B006
) -> Iterator[Row]:
    """Simulated time of a recurrent layer's launch for a decode of 64 sequences: some minutes for all.

    Simulates `pallas_kernels.recurrent`. A row has the bytes of a state, and the columns of tpu-attention: the launch
    reads and writes each sequence's state once."""
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for name, layer in chosen("layers", layers, SHAPES).items():
                start = time.perf_counter()
                launch = recurrent_launch(target, layer)
                run = simulate(launch, compile_launch(launch, dumps)[0], target)
                row: Row = {"target": target, "layer": name, "state bytes": launch.moved[0] // (2 * SEQS)}
                row |= row_of(run, launch.kind, target)
                yield row | {"seconds": round(time.perf_counter() - start)}


def recurrent_launch(target: str, layer: Layer) -> Launch:
    """Return the launch for a decode of 64 sequences, whose states lie in blocks of any order."""
    import jax.numpy as jnp

    from pallas_kernels import recurrent
    from pallas_kernels.recurrent.layout import StatePlace, Units

    array, _ = arrays_of(CHIPS[target])
    place = StatePlace(32, layer.state, jnp.dtype(layer.dtype))
    rows = place.rows(jnp.bfloat16)
    blocks = max(SEQS, POOL_BYTES // (LAYERS * (32 + rows) * 256))
    view = array((blocks, LAYERS, 32 + rows, 128), jnp.bfloat16)
    given = tuple(array(shape, jnp.float32) for shape in layer.operands(SEQS))

    def run(view, index, start, length, read, write, decodes, count, *operands):
        units = Units(start, length, read, write, decodes, count, most=1, decodes_only=True)
        return getattr(recurrent, layer.kernel)(view, index, place, units, *operands, impl="tpu")

    sequences = np.arange(SEQS, dtype=np.int32)
    states = np.random.default_rng(0).permutation(blocks)[:SEQS].astype(np.int32)
    units = sequences, np.ones(SEQS, np.int32), states, states, np.int32(SEQS), np.int32(SEQS)
    known = dict(enumerate((np.int32(1), *units), 1))
    arguments = (view, array(()), *[array((SEQS,))] * 4, array(()), array(()), *given)
    return Launch(run, arguments, "recurrent_decode", "recurrence", known, {0: 2 * SEQS * rows * 128 * 2}, (0,))
