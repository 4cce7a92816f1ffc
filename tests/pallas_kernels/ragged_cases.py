"""Random ragged batches over a paged cache, and the dense float64 attention that every kernel must agree with."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.kv_codes import TPU_TILE, scales_in_lanes
from pallas_kernels.layout import LANES, num_tiles, padded_head_dim, view_shape

NOWHERE = 10**6
"""A block id no view has: what holes in a block table hold."""


@dataclass(frozen=True)
class Case:
    """Shapes and options of a batch; equal cases compile once."""

    head_dim: int = 128
    kv_heads: int = 2
    q_per_kv: int = 2
    block_size: int = 16
    dtype: str = "float32"
    tokens: int = 24
    seqs: int = 4
    pages: int = 20
    layers: int = 2
    soft_cap: float | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    max_query_len: int | None = None
    sinks: bool = False
    codes: str | None = None
    """What KV is held in where that is not `dtype`: ``int8``, ``fp8`` or ``bf16``."""
    tile: int = TPU_TILE
    """Of a view of int8, see `pallas_kernels.kv_codes.block_rows`."""

    @property
    def blocks(self) -> int:
        return self.seqs * self.pages + 2

    @property
    def options(self) -> dict:
        names = ("soft_cap", "sliding_window", "chunk_size", "max_query_len")
        sinks = {"sinks": self.sink_logits} if self.sinks else {}
        return {"scale": self.head_dim**-0.5} | {name: getattr(self, name) for name in names} | sinks

    @property
    def sink_logits(self) -> np.ndarray:
        """One a query head, from hardly any share of the softmax to nearly all of it."""
        return np.linspace(-3, 6, self.kv_heads * self.q_per_kv, dtype=np.float32).reshape(self.kv_heads, -1)


@dataclass(frozen=True)
class Batch:
    """Arguments of `paged_attention` as NumPy arrays, with the dense K and V of each sequence they were cut from."""

    q: np.ndarray
    view: np.ndarray
    layer: int
    block_tables: np.ndarray
    query_starts: np.ndarray
    kv_lens: np.ndarray
    dense: list[tuple[np.ndarray, np.ndarray]]

    @property
    def arrays(self) -> tuple:
        return (self.q, self.view, self.layer, self.block_tables, self.query_starts, self.kv_lens)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` rounded to `dtype` (also bfloat16)."""
    import jax.numpy as jnp

    return np.asarray(jnp.asarray(array, dtype))


def empty_view(case: Case) -> np.ndarray:
    """A view of NaN, or of codes of which no one knows what they stand for."""
    dtype = {None: case.dtype, "int8": "int8", "fp8": "uint8", "bf16": "bfloat16"}[case.codes]
    shape = view_shape(case.blocks, case.layers, case.kv_heads, case.head_dim, case.block_size, dtype, case.tile)
    if case.codes in (None, "bf16"):
        return np.array(cast(np.full(shape, np.nan, np.float32), dtype))
    return np.full(shape, 0x7F, dtype)  # NaN in fp8; in int8 also the scales are NaN


def held(case: Case, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return a view's codes of float32 rows ``[..., 128]``, their scales' bytes, and the float64 both stand for."""
    if case.codes == "fp8":
        codes = rows.astype(ml_dtypes.float8_e4m3fn)
        return codes.view(np.uint8), None, codes.astype(np.float64)
    if case.codes in (None, "bf16"):
        numbers = cast(rows, case.dtype if case.codes is None else "bfloat16")
        return numbers, None, numbers.astype(np.float64)
    halves = rows.reshape(*rows.shape[:-1], 2, LANES // 2)
    scales = (np.abs(halves).max(axis=-1) / 127).astype(np.float16)
    steps = np.where(scales == 0, 1, scales.astype(np.float64))[..., None]
    codes = np.clip(np.rint(halves / steps), -127, 127)
    return codes.astype(np.int8).reshape(rows.shape), scales.view(np.int8), (codes * steps).reshape(rows.shape)


def make_batch(case: Case, query_lens: list[int], contexts: list[int], seed: int = 0) -> Batch:
    """A batch of sequences with `contexts` cached tokens before their `query_lens` new ones.

    Blocks come in random order. Everything no query may read is NaN: unused blocks, other layers, the end of a
    last block. Pages that no query sees hold `NOWHERE`.
    """
    random = np.random.default_rng(seed)
    lens = np.zeros(case.seqs, np.int32)
    lens[: len(query_lens)] = query_lens
    kv_lens = np.zeros(case.seqs, np.int32)
    kv_lens[: len(contexts)] = np.asarray(contexts) + query_lens
    view = empty_view(case)
    tables = np.full((case.seqs, case.pages), NOWHERE, np.int32)
    free = list(random.permutation(case.blocks))
    layer = int(random.integers(case.layers))
    dense = []
    for s, kv_len in enumerate(kv_lens):
        k, v = random.normal(size=(2, kv_len, case.kv_heads, case.head_dim)).astype(np.float32)
        pad = ((0, 0), (0, 0), (0, padded_head_dim(case.head_dim) - case.head_dim))
        rows = np.concatenate([np.pad(k, pad), np.pad(v, pad)], axis=-1)
        rows = rows.reshape(kv_len, case.kv_heads, num_tiles(case.head_dim), LANES)
        rows, scales, numbers = held(case, rows)
        numbers = numbers.reshape(kv_len, case.kv_heads, 2, padded_head_dim(case.head_dim))[..., : case.head_dim]
        dense.append((numbers[:, :, 0], numbers[:, :, 1]))
        first = 0
        if lens[s] == 0:
            continue
        if case.sliding_window is not None:
            first = max(0, kv_len - lens[s] - case.sliding_window + 1) // case.block_size
        if case.chunk_size is not None:
            first = (kv_len - lens[s]) // case.chunk_size * case.chunk_size // case.block_size
        for page in range(first, -(-kv_len // case.block_size)):
            tables[s, page] = free.pop()
            here = rows[page * case.block_size : (page + 1) * case.block_size]
            view[tables[s, page], layer, :, :, : len(here)] = here.transpose(1, 2, 0, 3)
            if scales is not None:
                here = scales[page * case.block_size : (page + 1) * case.block_size]
                behind = view[tables[s, page], layer, :, :, case.block_size :]
                if scales_in_lanes(view.shape[-2]):
                    behind[:, :, :4, : len(here)] = here.transpose(1, 2, 3, 0)
                    continue
                flat = behind.reshape(*behind.shape[:2], -1)
                flat[..., : 4 * len(here)] = here.transpose(1, 2, 0, 3).reshape(*flat.shape[:2], -1)
                behind[...] = flat.reshape(behind.shape)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    q = random.normal(size=(case.tokens, case.kv_heads, case.q_per_kv, case.head_dim))
    return Batch(cast(q, case.dtype), view, layer, tables, starts, kv_lens, dense)


def last_keys(case: Case, batch: Batch, length: int) -> np.ndarray:
    """Return the last key that each query sees where `length` neighbouring positions of a chunk see each other."""
    last = np.zeros(case.tokens, np.int32)
    for s, kv_len in enumerate(batch.kv_lens):
        mine = slice(batch.query_starts[s], batch.query_starts[s + 1])
        position = np.arange(kv_len - (mine.stop - mine.start), kv_len)
        last[mine] = np.minimum((position // length + 1) * length, kv_len) - 1
    return last


def last_keys_of_images(case: Case, batch: Batch, cuts: list[list[int]]) -> np.ndarray:
    """Return the last key that each query sees where those of an image see all of it.

    Args:
        cuts: of each sequence, where images begin and end, by turns, among its queries; text lies between them.
    """
    last = np.zeros(case.tokens, np.int32)
    for s, own in enumerate(cuts):
        first, stop = batch.query_starts[s : s + 2]
        context = batch.kv_lens[s] - (stop - first)
        last[first:stop] = context + np.arange(stop - first)
        for begin, end in zip(own[::2], own[1::2], strict=False):
            last[first + begin : first + end] = context + end - 1
    return last


def dense_attention(case: Case, batch: Batch, last: np.ndarray | None = None) -> np.ndarray:
    """Plain attention in float64 over each sequence's contiguous K and V; 0 for rows of no sequence.

    `last` is the last key that each query sees, its own where there is none."""
    out = np.zeros(batch.q.shape)
    for s, (k, v) in enumerate(batch.dense):
        mine = slice(batch.query_starts[s], batch.query_starts[s + 1])
        q = batch.q[mine].astype(np.float64)
        if not len(q):
            continue
        query = np.arange(len(k) - len(q), len(k))[:, None]
        key = np.arange(len(k))
        seen = key <= (query if last is None else last[mine, None])
        if case.sliding_window is not None:
            seen &= key > query - case.sliding_window
        if case.chunk_size is not None:
            seen &= key // case.chunk_size == query // case.chunk_size
        scores = case.options["scale"] * np.einsum("qhgd,khd->hgqk", q, k)
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        sink = np.exp(case.sink_logits[:, :, None, None] - top) if case.sinks else 0
        weights /= weights.sum(-1, keepdims=True) + sink
        out[mine] = np.einsum("hgqk,khd->qhgd", weights, v)
    return out
