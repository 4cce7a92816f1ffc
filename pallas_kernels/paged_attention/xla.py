"""Implements paged_attention for any XLA backend: split-KV decode units and query tiles, dynamic trip counts.

It runs on CPUs where the Numba version does not, and on GPUs where Triton's does not. The work follows the batch's
tokens, not the padded shapes: loops go over as many units as the batch needs.

- Decodes: each sequence's context is cut into units of tokens (flash-decoding); some units of any sequences are
  computed at once, and a pass over up to `_KEPT` of them joins a sequence's units by their softmax statistics. So the
  memory of their results does not grow with the block tables.
- Prefill chunks: some queries of a sequence at a time against some tokens of its context, with the online softmax of
  FlashAttention-2 (arXiv 2307.08691, algorithm 1).

How many, `Sizes` says: a unit's gathered KV should stay in a CPU's cache between its two products, while an
accelerator waits for its host at each turn of a loop.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kv_codes import decode, tokens_of
from pallas_kernels.layout import LANES, KVTiles
from pallas_kernels.paged_attention.reference import AttentionCall, Reach
from pallas_kernels.platform import target_platform

_KEPT = 1024
"""Units whose results are kept until they are joined."""
_NEVER = -1e30  # a finite stand-in for -inf: differences of two of them stay numbers
_Parts: TypeAlias = tuple[Array, Array, Array]
"""Softmaxes of queries over a part of their keys: the maximum, the sum and the weighted values of each."""


class Sizes(NamedTuple):
    """Says how much a turn of a loop takes.

    Attributes:
        unit: tokens of a decode's unit.
        units: most units that are computed at once.
        gathered: most numbers of K of these.
        tile: queries of a prompt that are computed at once.
        span: tokens that they are multiplied with.
    """

    unit: int
    units: int
    gathered: int
    tile: int
    span: int


_OF_CPU, _OF_ACCELERATOR = Sizes(64, 32, 2**24, 64, 128), Sizes(256, 256, 2**24, 128, 1024)


def _sizes() -> Sizes:
    """Return the sizes for the target devices."""
    return _OF_CPU if target_platform() == "cpu" else _OF_ACCELERATOR


class Problem(NamedTuple):
    """Holds the inputs of both paths."""

    q: Float[Array, "rows kv_heads q_per_kv key_width"]
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"]
    layer: Int[Array, ""]
    tables: Int[Array, "seqs pages"]
    kv_lens: Int[Array, " seqs"]
    soft_cap: float | None
    reach: Reach
    sinks: Float[Array, "kv_heads q_per_kv"] | None
    held: KVTiles
    sizes: Sizes


def paged_attention(call: AttentionCall) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    q, view, query_starts, kv_lens, value_dim = call.q, call.view, call.query_starts, call.kv_lens, call.value_dim
    tokens, _, _, head_dim = q.shape
    held = KVTiles.of(view.shape[3], value_dim)
    queries = jnp.pad(q.astype(jnp.float32) * call.scale, ((0, 0), (0, 0), (0, 0), (0, held.key_width - head_dim)))
    layer = jnp.asarray(call.layer, jnp.int32)
    problem = Problem(
        queries, view, layer, call.block_tables, kv_lens, call.soft_cap, call.reach, call.sinks, held, _sizes()
    )
    lengths = jnp.diff(query_starts)
    last = jnp.clip(query_starts[1:] - 1, 0, tokens - 1)
    token = jnp.arange(tokens)
    seq = jnp.minimum((token[:, None] >= query_starts[1:]).sum(axis=1), len(kv_lens) - 1)
    decoded = _decode(problem, last, jnp.where(lengths == 1, kv_lens, 0))[seq]
    if call.max_query_len == 1:
        out = decoded
    else:
        prefilled = prefill(problem, query_starts, jnp.where(lengths > 1, lengths, 0), call.last_keys)
        out = jnp.where((lengths[seq] == 1)[:, None, None, None], decoded, prefilled)
    out = jnp.where((token < query_starts[-1])[:, None, None, None], out, 0)
    return out[..., : value_dim or head_dim].astype(q.dtype)


# --------------------------------------------------------------------------- one token a sequence


def _decode(
    problem: Problem, row: Int[Array, " seqs"], lens: Int[Array, " seqs"]
) -> Float[Array, "seqs kv_heads q_per_kv value_width"]:
    """Attend from query row `row[s]` to the first `lens[s]` tokens of sequence s; 0 where there are none."""
    q, tables = problem.q, problem.tables
    seqs, pages = tables.shape
    _, kv_heads, q_per_kv, key_width = q.shape
    width, sizes = problem.held.value_width, problem.sizes
    block_size = tokens_of(problem.view)
    per_unit = max(1, sizes.unit // block_size)
    unit = per_unit * block_size
    first_key = problem.reach.first_key(lens - 1)
    first = first_key // unit
    counts = (lens + unit - 1) // unit - first
    ends = jnp.cumsum(counts)
    starts = ends - counts
    # Few sequences have few units: a full batch of them would mostly be padding.
    most = seqs * -(-pages // per_unit)
    batch = max(1, min(sizes.units, sizes.gathered // (unit * kv_heads * key_width), 4 * seqs, most))
    kept = -(-min(_KEPT, most) // batch) * batch

    # `batch` units a turn, of any sequences, from unit `begin` on. Their results are put into [kept, ...]: a static
    # shape, of which the loop, whose count is dynamic, fills as much as there are units.
    def compute(begin: int | Int[Array, ""], i: Int[Array, ""], parts: _Parts) -> _Parts:
        index = begin + i * batch + jnp.arange(batch)
        seq = jnp.minimum((index[:, None] >= ends).sum(axis=1), seqs - 1)
        chunk = first[seq] + index - starts[seq]
        page = chunk[:, None] * per_unit + jnp.arange(per_unit)
        position = chunk[:, None] * unit + jnp.arange(unit)
        seen = position < lens[seq, None]
        if problem.reach.limited:
            seen &= position >= first_key[seq, None]
        blocks = tables[seq[:, None], jnp.minimum(page, pages - 1)]
        k, v, seen = _gather(problem, blocks, seen)
        # XLA:CPU multiplies slowly with the transpose of K, but transposes K quickly during the gather.
        k = lax.optimization_barrier([tile.swapaxes(2, 3) for tile in k])
        mine = q[row[seq]]
        mask = seen[:, None, None]
        scores = jnp.where(mask, _cap(_scores(mine, k, "uhrd,uhdk->uhrk"), problem.soft_cap), _NEVER)
        top = scores.max(axis=3)
        weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
        values = jnp.concatenate([jnp.einsum("uhgk,uhkd->uhgd", weights, tile) for tile in v], axis=-1)
        return (
            lax.dynamic_update_slice(parts[0], top, (i * batch, 0, 0)),
            lax.dynamic_update_slice(parts[1], weights.sum(axis=3), (i * batch, 0, 0)),
            lax.dynamic_update_slice(parts[2], values, (i * batch, 0, 0, 0)),
        )

    # `kept` units a turn: turn j of its second loop merges the j-th unit that every sequence has among them; sequences
    # with fewer units merge nothing.
    def attend(number: int | Int[Array, ""], carry: tuple[_Parts, _Parts]) -> tuple[_Parts, _Parts]:
        begin = number * kept
        stop = jnp.minimum(begin + kept, ends[-1])
        turns = (stop - begin + batch - 1) // batch
        tops, sums, values = parts = lax.fori_loop(0, turns, partial(compute, begin), carry[0])
        own, after = jnp.clip(starts, begin, stop), jnp.clip(ends, begin, stop)

        def join(j: Int[Array, ""], state: _Parts) -> _Parts:
            at = jnp.minimum(own - begin + j, kept - 1)
            mine = (j < after - own)[:, None, None]
            return _merge(
                state,
                jnp.where(mine, tops[at], _NEVER),
                jnp.where(mine, sums[at], 0.0),
                jnp.where(mine[..., None], values[at], 0.0),
            )

        return parts, lax.fori_loop(0, (after - own).max(), join, carry[1])

    empty = (
        jnp.zeros((kept, kv_heads, q_per_kv), jnp.float32),
        jnp.zeros((kept, kv_heads, q_per_kv), jnp.float32),
        jnp.zeros((kept, kv_heads, q_per_kv, width), jnp.float32),
    )
    carry = empty, _blank(problem.sinks, (seqs, kv_heads, q_per_kv), width)
    turns = (ends[-1] + kept - 1) // kept
    carry = attend(0, carry) if kept >= most else lax.fori_loop(0, turns, attend, carry)
    _, total, out = carry[1]
    return out / jnp.where(total > 0, total, 1.0)[..., None]


# --------------------------------------------------------------------------- chunks of tokens


def prefill(
    problem: Problem,
    query_starts: Int[Array, " seqs+1"],
    lengths: Int[Array, " seqs"],
    last_keys: Int[Array, " tokens"] | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv value_width"]:
    """Attend from each sequence's last `lengths[s]` of ``kv_lens[s]`` tokens to all keys up to the token's own or, with
    `last_keys`, up to the given ones."""
    tokens, kv_heads, q_per_kv, width = problem.q.shape
    seqs, pages = problem.tables.shape
    block_size = tokens_of(problem.view)
    per_span = max(1, problem.sizes.span // block_size)
    span = per_span * block_size
    tile = min(problem.sizes.tile, tokens)
    tile_ends = jnp.cumsum((lengths + tile - 1) // tile)
    padded = jnp.pad(problem.q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(i: Int[Array, ""], out: Array) -> Array:
        seq = jnp.minimum((i >= tile_ends).sum(), seqs - 1)
        nth = i - jnp.where(seq > 0, tile_ends[seq - 1], 0)
        start = query_starts[seq] + nth * tile
        mine = lax.dynamic_slice(padded, (start, 0, 0, 0), (tile, kv_heads, q_per_kv, width))
        mine = mine.transpose(1, 0, 2, 3).reshape(1, kv_heads, tile * q_per_kv, width)
        begin = problem.kv_lens[seq] - lengths[seq] + nth * tile
        query_pos = last_pos = jnp.repeat(begin + jnp.arange(tile), q_per_kv)
        stop = jnp.minimum(begin + tile, problem.kv_lens[seq])
        if last_keys is not None:
            last = lax.dynamic_slice(jnp.pad(last_keys, (0, tile)), (start,), (tile,))
            own = jnp.arange(tile) < lengths[seq] - nth * tile
            stop = jnp.maximum(stop, jnp.where(own, last, 0).max() + 1)
            last_pos = jnp.repeat(last, q_per_kv)
        first = problem.reach.first_key(begin) // span if problem.reach.limited else 0

        def one_span(j: Int[Array, ""], state: _Parts) -> _Parts:
            page = j * per_span + jnp.arange(per_span)
            position = j * span + jnp.arange(span)
            blocks = problem.tables[seq, jnp.minimum(page, pages - 1)]
            k, v, known = _gather(problem, blocks[None], (position < stop)[None])
            seen = known[0] & (position <= last_pos[:, None])
            if problem.reach.limited:
                seen &= position >= problem.reach.first_key(query_pos)[:, None]
            scores = jnp.where(seen, _cap(_scores(mine, k, "uhrd,uhkd->uhrk"), problem.soft_cap)[0], _NEVER)
            top = scores.max(axis=2)
            weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
            parts = [jnp.einsum("hrk,hkd->hrd", weights, part[0]) for part in v]
            return _merge(state, top, weights.sum(axis=2), jnp.concatenate(parts, axis=-1))

        rows = tile * q_per_kv
        sinks = None if problem.sinks is None else jnp.tile(problem.sinks, (1, tile))
        blank = _blank(sinks, (kv_heads, rows), problem.held.value_width)
        _, total, values = lax.fori_loop(first, (stop + span - 1) // span, one_span, blank)
        values = values / jnp.where(total > 0, total, 1.0)[..., None]
        values = values.reshape(kv_heads, tile, q_per_kv, -1).transpose(1, 0, 2, 3)
        # A tile's rows past its sequence's end are overwritten by the tiles after it, or are not a prefill's.
        return lax.dynamic_update_slice(out, values, (start, 0, 0, 0))

    blank_rows = jnp.zeros((*padded.shape[:3], problem.held.value_width))
    return lax.fori_loop(0, tile_ends[-1], one_tile, blank_rows)[:tokens]


# --------------------------------------------------------------------------- shared pieces


def _gather(
    problem: Problem, blocks: Int[Array, "units pages"], seen: Bool[Array, "units span"]
) -> tuple[list[Array], list[Array], Bool[Array, "units span"]]:
    """Gather K and V of some blocks, a float32 ``[units, kv_heads, span, lanes]`` for each lane tile; V is 0 where not
    seen.

    Out-of-range blocks are not seen.
    """
    view = problem.view
    num_blocks, layers, kv_heads, tiles, block_rows, _ = view.shape
    block_size = tokens_of(view)
    units, pages = blocks.shape
    known = (blocks >= 0) & (blocks < num_blocks)
    seen = seen & jnp.repeat(known, block_size, axis=1)
    head = jnp.arange(kv_heads)[:, None]
    rows = (jnp.where(known, blocks, 0)[:, None] * layers + problem.layer) * kv_heads + head
    flat = view.reshape(num_blocks * layers * kv_heads * tiles, block_rows, LANES)

    def read(tile: int, lanes: slice) -> Array:
        picked = decode(flat.at[rows * tiles + tile].get(mode="promise_in_bounds"))[..., lanes]
        return picked.reshape(units, kv_heads, pages * block_size, -1)

    held = problem.held
    k = [read(t, slice(0, held.lanes)) for t in held.keys]
    # Tiles that hold both are gathered once.
    v = [k[t] if t in held.keys and not held.is_packed else read(t, slice(-held.lanes, None)) for t in held.values]
    return k, [jnp.where(seen[:, None, :, None], part, 0.0) for part in v], seen


def _scores(
    q: Float[Array, "units kv_heads rows key_width"], k: list[Array], product: str
) -> Float[Array, "units kv_heads rows span"]:
    """Return the scores of queries and keys; `k` has a tile of lanes each, as `product` says."""
    lanes = q.shape[-1] // len(k)
    parts = [jnp.einsum(product, q[..., t * lanes : (t + 1) * lanes], tile) for t, tile in enumerate(k)]
    return sum(parts[1:], parts[0])


def _cap(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _blank(sinks: Array | None, shape: tuple[int, ...], width: int) -> _Parts:
    """Return the softmax state of queries that saw no key yet: the sinks, broadcast to `shape`, have all the weight."""
    values = jnp.zeros((*shape, width))
    if sinks is None:
        return jnp.full(shape, _NEVER), jnp.zeros(shape), values
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape), values


def _merge(state: _Parts, top: Array, total: Array, values: Array) -> _Parts:
    """Join two partial softmaxes of the same queries."""
    new_top = jnp.maximum(state[0], top)
    old_scale, scale = jnp.exp(state[0] - new_top), jnp.exp(top - new_top)
    return (
        new_top,
        state[1] * old_scale + total * scale,
        state[2] * old_scale[..., None] + values * scale[..., None],
    )
