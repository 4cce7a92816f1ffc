"""Makes the step: a pure function from (params, pool, batch) to (pool, hidden states), jitted once a bucket.

What follows it, the vocabulary's logits and the draw, is a separate function
(`jpaged.execution.sampling.sample_step`): its shapes depend on the rows that are sampled only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.caches.base import LayerCall, Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.mesh import Kind, each_replica, over_tensor, own_sharding, pool_sharding, row_impl, under_mesh
from jpaged.execution.packing import Packed, unpacked
from jpaged.execution.params import plain_dict
from jpaged.execution.prompt_attention import PromptAttention
from jpaged.model_api import TENSOR_AXIS, LayerRef, SkipsUnreadRows
from pallas_kernels.block_copy import block_copy
from pallas_kernels.platform import Impl
from pallas_kernels.thread_pool import on_thread_pool


def make_step(
    graphdef: nnx.GraphDef,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    kernel_impl: Impl | None = None,
    prefix: str = "",
    followed: bool = False,
    taps: bool = False,
) -> jax.stages.Wrapped:
    """Return the step function ``step(params, pool, batch, last_tokens, decode_only=...) -> (pool, sampled, hidden)``.

    `pool` is donated. `batch` may be packed (`jpaged.execution.packing`). `last_tokens` are the tokens of the step
    before, still on the device. `hidden`, ``[tokens, embed]``, are the final hidden states, `sampled`,
    ``[max_num_seqs, embed]``, those of the rows in ``batch.sample_at``.

    Args:
        kernel_impl: which kernels run; None = what the current platform is best at. Needed when compiling
            ahead of time for another platform.
        prefix: what the names of the model's layer groups begin with in `spec`, see `layer_operations`.
        followed: whether a head that drafts reads what the model computes of every token, so that none is left out.
        taps: whether the model was asked to return the states within it (`jpaged.model_api.Tappable`), which are then a
            further result, ``[tokens, states]``.
    """
    run = _runner(graphdef, spec, mesh, kernel_impl=kernel_impl, prefix=prefix, followed=followed)

    def step(
        params: Any, pool: Pool, batch: StepBatch | Packed, last_tokens: Int[Array, " max_seqs"], *, decode_only: bool
    ) -> tuple[Any, ...]:
        batch = _begun(batch, mesh)
        pool, hidden, *within = run(params, pool, batch, last_tokens, decode_only=decode_only)
        return pool, hidden[batch.sample_at], hidden, *within

    gives: list[Kind] = ["split", "own", "own"]
    gives += ["own"] * taps

    def steps(
        params: Any, pool: Pool, batch: StepBatch | Packed, last_tokens: Array, *, decode_only: bool
    ) -> tuple[Array, ...]:
        takes: tuple[Kind, ...] = ("shared", "split", "own", "own")
        return each_replica(partial(step, decode_only=decode_only), mesh, takes, tuple(gives))(
            params, pool, batch, last_tokens
        )

    return jax.jit(
        steps,
        donate_argnames=("pool",),
        static_argnames=("decode_only",),
        out_shardings=tuple(pool_sharding(mesh) if kind == "split" else own_sharding(mesh) for kind in gives),
    )


def make_follow(
    graphdef: nnx.GraphDef, spec: PoolSpec, mesh: Mesh, *, kernel_impl: Impl | None = None, prefix: str = ""
) -> jax.stages.Wrapped:
    """Return ``follow(params, pool, batch, last_tokens, target, decode_only=...) -> pool``, which runs a
    `jpaged.model_api.DraftHead` over tokens that the model has computed; `target` [tokens, states] is what it reads of
    them.

    Nothing but the pool comes back, so that the compiler leaves out what only hidden states depend on: of the head's
    layer no more than its keys and values are computed. `pool` is donated.

    Args:
        kernel_impl, prefix: see `make_step`.
    """
    run = _runner(graphdef, spec, mesh, kernel_impl=kernel_impl, prefix=prefix)

    def follow(
        params: Any, pool: Pool, batch: StepBatch | Packed, last_tokens: Array, target: Array, *, decode_only: bool
    ) -> Pool:
        takes: tuple[Kind, ...] = ("shared", "split", "own", "own", "own")

        def own(params: Any, pool: Pool, batch: StepBatch | Packed, *others: Array) -> Pool:
            return run(params, pool, _begun(batch, mesh), *others, decode_only=decode_only)[0]

        return each_replica(own, mesh, takes, "split")(params, pool, batch, last_tokens, target)

    return jax.jit(
        follow, donate_argnames=("pool",), static_argnames=("decode_only",), out_shardings=pool_sharding(mesh)
    )


def _begun(batch: StepBatch | Packed, mesh: Mesh) -> StepBatch:
    """Return a step's arrays, unpacked; from here on a CPU's program leaves the thread that dispatched it."""
    move = partial(on_thread_pool, impl=row_impl(mesh))
    if isinstance(batch, Packed):
        assert batch.words is not None, "a step has arrays of the host"
        whole: StepBatch = unpacked(replace(batch, words=move(jnp.asarray(batch.words))))
        return whole
    return batch._replace(source_rows=move(jnp.asarray(batch.source_rows)))


def _runner(
    graphdef: nnx.GraphDef,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    kernel_impl: Impl | None,
    prefix: str,
    followed: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Return ``run(params, pool, batch, last_tokens, *target, decode_only=...) -> (pool, hidden, *within)`` of one
    replica; see `make_step` and `make_follow`."""

    def run(
        params: Any,
        pool: Pool,
        batch: StepBatch,
        last_tokens: Int[Array, " max_seqs"],
        target: Float[Array, "tokens states"] | None = None,
        *,
        decode_only: bool,
    ) -> tuple[Any, ...]:
        rows = jnp.asarray(batch.source_rows)
        tokens = jnp.where(rows >= 0, last_tokens[jnp.maximum(rows, 0)], batch.tokens)
        longest = 1 if decode_only else None
        operate = layer_operations(spec, mesh, batch, max_query_len=longest, impl=kernel_impl, prefix=prefix)
        if not prefix:  # the pool keeps adapters of the engine's model only
            params = with_adapters(spec, mesh, batch, params)
        model = nnx.merge(graphdef, params)
        if prefix:  # a draft model may not know the token that stands for an image
            tokens = jnp.minimum(tokens, model.vocab_size - 1)
        read = None if followed else read_rows(model, spec, batch)
        with under_mesh(mesh):
            call = partial(model, tokens, batch.positions, pool, operate, batch.query_starts[-1])
            options = {"read": read, "target": target}
            hidden, pool, *within = call(**{name: value for name, value in options.items() if value is not None})
        return pool, hidden, *within

    return run


def read_rows(model: Any, spec: PoolSpec, batch: StepBatch) -> Bool[Array, " tokens"] | None:
    """Return of which rows the hidden states are read; None: of all, or the model computes all of them anyway."""
    leaves_out = isinstance(model, SkipsUnreadRows) and model.skips_unread_rows
    if batch.reads_all is None or not leaves_out or not all(cache.skips_unread_rows for cache in spec.caches):
        return None
    tokens = len(batch.tokens)
    return jnp.zeros(tokens, bool).at[batch.sample_at].set(True) | batch.reads_all


def with_adapters(spec: PoolSpec, mesh: Mesh, batch: StepBatch, params: Any) -> Any:
    """Return the weights with which the layers of a step compute: the model's, changed by its rows' adapters."""
    for cache, group_slice, arrays in zip(spec.caches, spec.slices, batch.caches, strict=True):
        if isinstance(cache, AdapterCache) and arrays.matrices is not None:
            params = cache.adapted(_call(mesh, batch, arrays, spec.views[group_slice]), plain_dict(params))
    return params


def layer_operations(
    spec: PoolSpec, mesh: Mesh, batch: StepBatch, *, max_query_len: int | None, impl: Impl | None, prefix: str = ""
) -> Callable[..., tuple[Pool, Any]]:
    """Return the function that the model calls with a layer of any kind, ``operate(pool, layer, *operands) -> (pool,
    result)``; for attention it is a `jpaged.model_api.Attend`, without a layer an `AttendWithinPrompts`.

    Args:
        prefix: what is put before a group's name as the model knows it: the pool may hold the groups of two models.
    """
    kinds = {}
    for cache, group_slice, arrays in zip(spec.caches, spec.slices, batch.caches, strict=True):
        call = _call(mesh, batch, arrays, spec.views[group_slice], max_query_len, impl)
        kinds[cache.group.name] = (cache, replace(call, prepared=cache.prepare(call, len(batch.tokens))))

    within = None
    if not spec.caches:
        starts, tokens = batch.query_starts, len(batch.tokens)
        within = PromptAttention(mesh, starts, tokens, max_query_len=max_query_len, impl=impl)

    def operate(pool: Pool, layer: LayerRef | None, *operands: Any, **options: Any) -> tuple[Pool, Any]:
        if layer is None:
            assert within is not None, "a model that keeps KV attends in layers"
            return pool, within(*operands, **options)
        if layer.of_model:
            cache, call = kinds[layer.group]
            return cache.operate(call, pool, layer.index + len(cache.group.layers), *operands, **options)
        cache, call = kinds[prefix + layer.group]
        return cache.operate(call, pool, layer.index, *operands, **options)

    return operate


def _call(
    mesh: Mesh,
    batch: StepBatch,
    arrays: Any,
    views: tuple[tuple[int, ...], ...],
    max_query_len: int | None = None,
    impl: Impl | None = None,
) -> LayerCall:
    """Return the call that the layers of a group get, from the group's arrays of the step and its views of the pool."""
    return LayerCall(
        mesh=mesh,
        query_starts=batch.query_starts,
        kv_lens=batch.kv_lens,
        arrays=arrays,
        views=views,
        max_query_len=max_query_len,
        impl=impl,
    )


def make_block_copy(spec: PoolSpec, mesh: Mesh, *, kernel_impl: Impl | None = None) -> jax.stages.Wrapped:
    """Return ``copy(pool, src, dst) -> pool``, which makes all of a step's block copies in a launch a group; the pool
    is donated.

    Out-of-range ids (padding) copy nothing.
    """

    def copy(pool: Pool, src: Int[Array, "groups copies"], dst: Int[Array, "groups copies"]) -> Pool:
        def on_shard(pool, src, dst):
            shape = pool.shape
            for group, view_shape in enumerate(spec.views):
                blocks = pool.reshape(view_shape)
                pool = block_copy(blocks, src[group], dst[group], impl=kernel_impl).reshape(shape)
            return pool

        sharded = over_tensor(
            on_shard,
            mesh,
            in_specs=(PartitionSpec(TENSOR_AXIS), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(TENSOR_AXIS),
        )
        return sharded(pool, src, dst)

    return jax.jit(each_replica(copy, mesh, ("split", "own", "own"), "split"), donate_argnums=0)
