"""Estimates the temporaries of programs where no compiler is installed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.execution.device_memory import ProgramSize
from jpaged.execution.lowering import StepPrograms
from pallas_kernels.held_matrix import is_held

ROWS_HELD = 6
"""Arrays of [tokens, widest] and [rows, vocabulary] that are alive at once. Of Llama-3.3-70B on eight v6e or H200 (64
sequences of 8192 tokens) the result is within 0.2 GiB of the compilers' figures, above the TPU's, below the GPU's."""


LEAST_CONTRACTED = 16
"""Fewest numbers that a product sums."""


def estimate_largest(programs: StepPrograms) -> tuple[ProgramSize, ...]:
    """Estimate what `jpaged.engine.memory_plan.compile_largest` measures, from the widest activations, those of the
    encoder's own for its rows, and float32 logits with the tables of their edits."""
    itemsize = _activations(programs.params).itemsize
    step = ROWS_HELD * programs.max_num_batched_tokens * _widest(programs.params) * itemsize
    logits = ROWS_HELD * programs.max_num_seqs * -(-programs.vocab_size // programs.spec.shards) * 4
    encoding: tuple[ProgramSize, ...] = ()
    if programs.image_rows is not None:
        tower = {part: programs.params[part] for part in nnx.merge(programs.graphdef, programs.params).encoder_parts}
        row = ROWS_HELD * programs.image_rows.longest * _widest(tower) * itemsize
        encoding = (ProgramSize("image encoder", row, 0, 0.0),)
    sampler = ProgramSize("sampler", logits + programs.table_bytes, 0, 0.0)
    return ProgramSize("mixed step", step, 0, 0.0), sampler, *encoding


def _widest(params: Any) -> int:
    return max((_width(leaf) for leaf in jax.tree.leaves(params, is_leaf=_is_tiled)), default=0)


def _activations(params: Any) -> jnp.dtype:
    """Return the dtype that most floats are held in: KV and codes may be narrower, what a recurrence repeats wider."""
    held: Counter[jnp.dtype] = Counter()
    for leaf in jax.tree.leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1:
            held[jnp.dtype(leaf.dtype)] += leaf.size
    return max(held, key=lambda dtype: held[dtype])


def _is_tiled(leaf: Any) -> bool:
    """Tell whether a leaf is a float matrix in a CPU's layout, whose array has other axes than the matrix."""
    return is_held(leaf) and not leaf.has_codes


def _width(leaf: Any) -> int:
    """Return the number of columns of a device's part of a matrix; 0 for a table of few, long rows, which no activation
    is multiplied with (the positions of an image's tiles, millions of numbers for each of nine forms)."""
    shape = leaf.shape if _is_tiled(leaf) else leaf.sharding.shard_shape(leaf.shape)
    return 0 if len(shape) > 1 and shape[-2] < LEAST_CONTRACTED else shape[-1]
