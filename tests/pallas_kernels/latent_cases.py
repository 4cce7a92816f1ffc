"""Random batches over latents in blocks, and the dense float64 attention that every kernel must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from ragged_cases import NOWHERE, cast

from pallas_kernels.kv_codes import decode
from pallas_kernels.latent_attention import latent_write
from pallas_kernels.layout import latent_view_shape

SEQS, PAGES, LAYERS, LAYER, TOKENS = 3, 18, 2, 1, 20
SCALE = 0.2


@dataclass(frozen=True)
class Case:
    """Shapes of a batch; equal cases compile once."""

    rank: int
    rotary: int
    heads: int = 3
    block_size: int = 16
    dtype: str = "float32"
    held: str | None = None
    """The view's dtype where that is not `dtype`."""

    @property
    def width(self) -> int:
        return self.rank + self.rotary


CASES = {
    "one tile": Case(46, 14),
    "DeepSeek's widths": Case(512, 64, heads=2),
    "a value that ends within a tile of its key, bfloat16": Case(192, 64, heads=5, dtype="bfloat16"),
    "int8": Case(128, 40, block_size=32, held="int8"),
    "fp8, bfloat16": Case(130, 14, block_size=32, dtype="bfloat16", held="uint8"),
}


@cache
def writer(impl):
    return jax.jit(partial(latent_write, impl=impl))


def make_batch(case, query_lens, contexts, seed=0, tile=8):
    """(q, view, tables, starts, lens) and each sequence's rows as held; what no query may read is NaN if it can be.

    `tile`: of a view of int8, see `pallas_kernels.kv_codes.block_rows`; 8 where a TPU holds it.
    """
    random = np.random.default_rng(seed)
    held, tile = case.held or case.dtype, tile if case.held == "int8" else 1
    blocks = SEQS * PAGES + 2
    shape = latent_view_shape(blocks, LAYERS, case.width, case.block_size, held, tile)
    view = jnp.full(shape, 0x7F, held) if case.held else jnp.full(shape, jnp.nan, held)
    tables = np.full((SEQS, PAGES), NOWHERE, np.int32)
    lens, kv_lens = np.zeros((2, SEQS), np.int32)
    lens[: len(query_lens)] = query_lens
    kv_lens[: len(contexts)] = np.asarray(contexts, np.int32) + lens[: len(contexts)]
    free, rows = list(random.permutation(blocks)), []
    for s in range(SEQS):
        pages = -(-kv_lens[s] // case.block_size)
        tables[s, :pages] = [free.pop() for _ in range(pages)]
        rows.append(random.normal(size=(kv_lens[s], case.width)).astype(np.float32))
        size = PAGES * case.block_size
        slots = np.full(size, -1, np.int32)
        position = np.arange(kv_lens[s])
        slots[: kv_lens[s]] = tables[s, position // case.block_size] * case.block_size + position % case.block_size
        padded = np.zeros((size, case.width), np.float32)
        padded[: kv_lens[s]] = rows[s]
        view = writer("reference")(view, LAYER, padded, slots)
    values = np.asarray(jax.jit(decode)(view[:, LAYER, 0]), np.float64)  # [blocks, tiles, block_size, 128]
    for s in range(SEQS):
        mine = values[tables[s, : -(-kv_lens[s] // case.block_size)]].swapaxes(1, 2)
        rows[s] = mine.reshape(-1, mine.shape[2] * mine.shape[3])[: kv_lens[s], : case.width]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    q = cast(random.normal(size=(TOKENS, case.heads, case.width)), case.dtype)
    return (q, view, tables, starts, kv_lens), rows


def dense(case, arrays, rows):
    q, _, _, starts, _ = arrays
    out = np.zeros((TOKENS, case.heads, case.rank))
    for s, row in enumerate(rows):
        for token in range(starts[s], starts[s + 1]):
            seen = row[: len(row) - (starts[s + 1] - token) + 1]
            scores = SCALE * q[token].astype(np.float64) @ seen.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : case.rank]
    return out
