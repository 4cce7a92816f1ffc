"""Computes log-probabilities as a deterministic engine does, to the last bit, over a separate pool.

The programs are the engine's: its step, run as launches of 64 tokens that are decodes of their own (see
`jpaged.execution.deterministic`), then its head over as many rows as its sampler has. A token's bits depend on its
sequence only, so it does not matter that sequences and launches are others here than in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.batch import single_tokens
from jpaged.execution.caches.attention import AttentionBatch, TokenSlots
from jpaged.execution.caches.base import LayerCache, group_specs
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.state import StateBatch, StateCache, TokenByToken
from jpaged.execution.deterministic import ROWS
from jpaged.execution.mesh import pool_sharding, row_impl, under_mesh
from jpaged.execution.step import make_step
from jpaged.memory.layout import GroupLayout, PoolLayout
from jpaged.memory.policies import StateCheckpoints, VerifiedStates
from jpaged.training.scores import chosen_logprobs
from jpaged.training.sequences import places
from pallas_kernels.recurrent.layout import CARRY, NEW


@dataclass(frozen=True)
class EngineShapes:
    """Says which programs an engine runs.

    Attributes:
        graphdef: the engine's model without its weights.
        spec: its pool, of which only the blocks' form matters.
        mesh: its devices.
        max_num_seqs: rows of its sampler.
        max_model_len: most tokens of a sequence.
        deterministic: whether it computes token by token.
    """

    graphdef: nnx.GraphDef
    spec: PoolSpec
    mesh: Mesh
    max_num_seqs: int
    max_model_len: int
    deterministic: bool


def check_exact(shapes: EngineShapes, groups: frozenset[str], tokens: int) -> None:
    """Check that an engine's bits can be had.

    Args:
        groups: names of the model's layer groups.
        tokens: the most tokens that a sequence may have, without its padding where that is known.

    Raises:
        ValueError: the engine is not deterministic, sequences are longer than it takes, or a kind of layer cannot be
            computed token by token.
    """
    if not shapes.deterministic:
        raise ValueError("deterministic=True needs an engine that is: LLM(..., deterministic=True)")
    if tokens > shapes.max_model_len:
        raise ValueError(f"sequences of {tokens} tokens are above the engine's max_model_len={shapes.max_model_len}")
    for cache in shapes.spec.caches:
        if cache.group.name in groups and not isinstance(cache, TokenSlots | StateCache):
            kind = f"layer group {cache.group.name!r} ({cache.group.kind})"
            raise ValueError(f"deterministic=True: {kind} has no logprobs to the bit")


def exact_logprobs(
    shapes: EngineShapes,
    groups: frozenset[str],
    params: Any,
    tokens: Int[Array, "batch tokens"],
    wanted: Bool[Array, "batch tokens"],
    real: Bool[Array, "batch tokens"],
) -> Float[Array, "batch tokens"]:
    """Return the log-probability of each wanted token after those before it in its sequence; 0 for the others.

    Args:
        groups: names of the model's layer groups.
        wanted: real tokens that are not the first of their sequence.
        real: which tokens are a sequence's; those lie side by side, with padding before or after them.
    """
    # The code around a program must not change its bits: nothing is fused across its borders.
    params, tokens, wanted, real = jax.lax.optimization_barrier((params, tokens, wanted, real))
    hidden, row_of = _hidden_states(shapes, groups, params, tokens, real)
    model = nnx.merge(shapes.graphdef, params)
    size, rows, impl = tokens.size, shapes.max_num_seqs, row_impl(shapes.mesh)
    padded = -(-size // rows) * rows
    order, count = _compacted(wanted)
    order = jnp.pad(order, (0, padded - size))
    flat = tokens.reshape(-1)

    def score(number: Array, found: Array) -> Array:
        here = jax.lax.dynamic_slice_in_dim(order, number * rows, rows)
        before = hidden[row_of[jnp.maximum(here - 1, 0)]]
        with under_mesh(shapes.mesh):
            logits = model.logits(before, jnp.minimum(count - number * rows, rows))
        logprobs = chosen_logprobs(jax.lax.optimization_barrier(logits), flat[here], impl)
        return jax.lax.dynamic_update_slice_in_dim(found, logprobs, number * rows, 0)

    found = jax.lax.fori_loop(0, -(-count // rows), score, jnp.zeros(padded, jnp.float32))
    found = jnp.where(jnp.arange(padded) < count, found, 0.0)[:size]
    out = jnp.zeros(size, jnp.float32).at[order[:size]].set(found)
    return jax.lax.optimization_barrier(out.reshape(tokens.shape))


def _hidden_states(
    shapes: EngineShapes,
    groups: frozenset[str],
    params: Any,
    tokens: Int[Array, "batch tokens"],
    real: Bool[Array, "batch tokens"],
) -> tuple[Float[Array, "rows embed"], Int[Array, " batch_tokens"]]:
    """Return hidden states and, for each token, which of them is its own."""
    batch, length = tokens.shape
    spec, tables = _own_pool(shapes, groups, batch, length)
    step = make_step(shapes.graphdef, spec, shapes.mesh)
    order, count = _compacted(real)
    padded = -(-tokens.size // ROWS) * ROWS
    row_of = jnp.zeros(tokens.size, jnp.int32).at[order].set(jnp.arange(tokens.size, dtype=jnp.int32))
    order = jnp.pad(order, (0, padded - tokens.size))
    row, no_rows = jnp.arange(ROWS, dtype=jnp.int32), jnp.zeros(shapes.max_num_seqs, jnp.int32)
    flat_tokens, flat_places = tokens.reshape(-1), places(real).reshape(-1)

    def launch(number: Array, pool: Array) -> tuple[Array, Array]:
        here = jax.lax.dynamic_slice_in_dim(order, number * ROWS, ROWS)
        left = jnp.minimum(count - number * ROWS, ROWS)
        rows = _Rows(here // length, jnp.where(row < left, flat_places[here], 0), row < left)
        by_token = {
            "tokens": jnp.where(rows.live, flat_tokens[here], 0),
            "source_rows": jnp.full(ROWS, -1, jnp.int32),
            "positions": rows.position,
        }
        caches = (
            _arrays(cache, spec.layout.groups[group_slice][0], table, rows)
            for cache, group_slice, table in zip(spec.caches, spec.slices, tables, strict=True)
        )
        arrays = single_tokens(by_token, left, tuple(caches), no_rows, xp=jnp)
        pool, _, hidden = step(params, pool, jax.lax.optimization_barrier(arrays), no_rows, decode_only=True)
        return pool, hidden

    def put(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pool, hidden = carry
        pool, computed = launch(number, pool)
        return pool, jax.lax.dynamic_update_slice_in_dim(hidden, computed, number * ROWS, 0)

    pool = jax.lax.with_sharding_constraint(jnp.zeros(spec.shape, spec.dtype), pool_sharding(shapes.mesh))
    like = jax.eval_shape(launch, jnp.int32(0), pool)[1]
    hidden = jnp.zeros((padded, *like.shape[1:]), like.dtype)
    return jax.lax.fori_loop(0, -(-count // ROWS), put, (pool, hidden))[1], row_of


class _Rows(NamedTuple):
    """Says of each row of a launch whose token it is, where it stands, and whether there is one."""

    seq: Int[Array, " rows"]
    position: Int[Array, " rows"]
    live: Bool[Array, " rows"]


def _own_pool(
    shapes: EngineShapes, groups: frozenset[str], batch: int, length: int
) -> tuple[PoolSpec, list[Int[np.ndarray, "batch width"]]]:
    """Return a pool that holds `batch` sequences padded to `length` tokens and, for each layer group, their block
    tables, which are as wide as the engine's."""
    length = min(length, shapes.max_model_len)  # all else is padding, see `check_exact`
    caches = [cache for cache in shapes.spec.caches if cache.group.name in groups]
    planned = {plan.spec.name: plan for plan in shapes.spec.layout.groups}
    plans = [planned[spec.name] for spec in group_specs(caches)]
    pages, blocks = 0, {}
    for plan in plans:
        size = plan.spec.block_size
        each = 1 if isinstance(plan.spec.policy, StateCheckpoints | VerifiedStates) else -(-length // size)
        blocks[plan.spec.name] = pages * plan.blocks_per_page + np.arange(batch * each).reshape(batch, each)
        pages += -(-batch * each // plan.blocks_per_page)
    sized = tuple(replace(plan, num_blocks=pages * plan.blocks_per_page) for plan in plans)
    spec = PoolSpec(PoolLayout(sized, shapes.spec.layout.page_bytes, pages), tuple(caches))
    tables = []
    for cache, group_slice in zip(spec.caches, spec.slices, strict=True):
        own = sized[group_slice][0].spec
        width = max(cache.table_width(own, shapes.max_model_len), blocks[own.name].shape[1])
        table = np.full((batch, width), -1, np.int32)
        table[:, : blocks[own.name].shape[1]] = blocks[own.name]
        tables.append(table)
    return spec, tables


def _arrays(cache: LayerCache, plan: GroupLayout, table: Int[np.ndarray, "batch width"], rows: _Rows) -> Any:
    """Return a layer group's arrays of a launch, as `LayerCache.one_by_one` would make them."""
    own = jnp.asarray(table)[rows.seq]
    if isinstance(cache, StateCache):
        return _state_arrays(own[:, 0], rows)
    size = plan.spec.block_size
    block = jnp.take_along_axis(own, rows.position[:, None] // size, axis=1)[:, 0]
    slots = jnp.where(rows.live, block * size + rows.position % size, plan.num_blocks * size)
    return AttentionBatch(own, slots)


def _state_arrays(block: Int[Array, " rows"], rows: _Rows) -> TokenByToken:
    """Make each token a unit; a sequence's last one in the launch leaves the state where the next launch finds it."""
    number = jnp.arange(ROWS, dtype=jnp.int32)
    read = jnp.where(rows.position == 0, NEW, jnp.where(number == 0, block, CARRY))
    follows = jnp.roll(rows.live, -1).at[-1].set(False) & (jnp.roll(rows.seq, -1) == rows.seq)
    write = jnp.where(follows, -1, block)
    nothing = jnp.int32(0)
    return TokenByToken(
        StateBatch(
            start=jnp.where(rows.live, number, 0),
            length=rows.live.astype(jnp.int32),
            read=jnp.where(rows.live, read, -1),
            write=jnp.where(rows.live, write, -1),
            num_decodes=nothing,
            num_units=rows.live.sum(dtype=jnp.int32),
        )
    )


def _compacted(chosen: Bool[Array, "batch tokens"]) -> tuple[Int[Array, " rows"], Int[Array, ""]]:
    """Return flat indices with those of chosen tokens first, in order, and how many are chosen."""
    flat = chosen.reshape(-1)
    return jnp.argsort(~flat, stable=True).astype(jnp.int32), flat.sum(dtype=jnp.int32)
